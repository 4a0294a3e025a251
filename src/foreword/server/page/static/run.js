// A run while its events arrive: its passes, with their draft tokens, tokens and times. Does not use the page.

export class Pass {
  constructor(index, shown) {
    this.index = index;
    this.draftTokens = shown.guesses; // [nodes], the text of each draft token
    this.parents = shown.parents; // [nodes], the parent's index; -1: the node follows the committed text
    this.accepted = shown.accepted; // indices of the accepted nodes, first to last
    this.gained = shown.gained; // number of committed tokens: the accepted ones, then one of the target's own
    this.pieces = []; // the texts of the committed tokens that have arrived
    this.begin = this.end = null; // milliseconds since the first token; null: unknown
    this.draftMs = 0; // milliseconds of drafting
  }

  get isFull() {
    return this.pieces.length >= this.gained;
  }

  get rejected() {
    return this.draftTokens.length - this.accepted.length;
  }

  // The number of levels of the draft tree; for a chain, its length.
  get levels() {
    const depths = [];
    for (const parent of this.parents) depths.push(parent < 0 ? 1 : depths[parent] + 1);
    return Math.max(0, ...depths);
  }

  get branches() {
    return new Set(this.parents).size < this.parents.length;
  }

  childrenOf(node) {
    return this.parents.flatMap((parent, child) => (parent === node ? [child] : []));
  }

  // The first rejected branch: the nodes after the last accepted one, following the first child each time.
  get missed() {
    const accepted = new Set(this.accepted);
    const branch = [];
    let [next] = this.childrenOf(this.accepted.at(-1) ?? -1).filter((node) => !accepted.has(node));
    while (next !== undefined) {
      branch.push(next);
      [next] = this.childrenOf(next);
    }
    return branch;
  }

  // The text of the target's own token; empty if it has not arrived, null if the pass committed none.
  get own() {
    return this.gained > this.accepted.length ? (this.pieces[this.gained - 1] ?? "") : null;
  }
}

export class Run {
  constructor(name) {
    this.name = name;
    this.passes = [];
    this.tokenIds = [];
    this.text = "";
    this.progress = null;
    this.timings = null;
    this.timed = 0; // number of passes whose times are known
    this.filling = 0; // index of the pass whose tokens are arriving
    this.began = this.now = null; // by this page's clock, used until the engine's times arrive
  }

  // Add an event; return its texts as [pass or null, text, index among the pass's tokens].
  note(event) {
    this.now = performance.now();
    this.began ??= this.now;
    if (event.timings) this.timings = event.timings;
    if (event.speculation?.method) this.name = event.speculation.method; // the drafter that was used
    if (!event.origin) return [];
    const { pieces, passes = [], progress } = event.origin;
    for (const shown of passes) this.passes.push(new Pass(this.passes.length, shown));
    this.tokenIds.push(...event.token_ids);
    this.text += event.text;
    const placed = pieces.map((piece) => this.assign(piece, event.token_ids.length > 0));
    if (progress) this.setTimes(progress);
    return placed;
  }

  // Assign a text to the first pass that still lacks tokens.
  assign(piece, isToken) {
    if (!this.passes.length) return [null, piece, 0];
    while (this.filling < this.passes.length - 1 && this.passes[this.filling].isFull) this.filling += 1;
    const pass = this.passes[this.filling];
    if (isToken) pass.pieces.push(piece);
    return [pass, piece, Math.max(pass.pieces.length - 1, 0)];
  }

  // Divide the time since the last progress report evenly among the passes that have no times yet.
  setTimes(progress) {
    const last = this.progress ?? { decode_ms: progress.decode_ms, draft_ms: progress.draft_ms };
    const untimed = this.passes.slice(this.timed);
    this.timed = this.passes.length;
    const share = (name) => (progress[name] - last[name]) / untimed.length;
    untimed.forEach((pass, index) => {
      pass.begin = last.decode_ms + index * share("decode_ms");
      pass.end = pass.begin + share("decode_ms");
      pass.draftMs = share("draft_ms");
    });
    this.progress = progress;
  }

  get tokens() {
    return this.tokenIds.length;
  }

  get duration() {
    return this.passes[this.timed - 1]?.end ?? 0;
  }

  get seconds() {
    if (this.timings) return this.timings.predicted_ms / 1e3;
    return this.progress ? this.progress.decode_ms / 1e3 : (this.now - this.began) / 1e3;
  }

  get rate() {
    const first = this.passes[0]?.gained ?? 1; // decoding time begins after the first pass
    return this.tokens > first && this.seconds > 0 ? (this.tokens - first) / this.seconds : 0;
  }

  get line() {
    const passes = this.progress ? ` in ${this.progress.passes} passes` : "";
    return `${this.tokens} tokens${passes}, ${this.seconds.toFixed(2)} s, ${this.rate.toFixed(1)} per second`;
  }
}
