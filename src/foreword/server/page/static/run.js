// A run as it grows: its passes, with their draft tokens, tokens and times. Knows nothing of the page.

export class Pass {
  constructor(index, shown) {
    this.index = index;
    this.guesses = shown.guesses; // [nodes], the text of each
    this.parents = shown.parents; // [nodes], an earlier node, or -1 after the text
    this.accepted = shown.accepted; // nodes, first to last
    this.gained = shown.gained; // tokens: the accepted ones, then one of the target's own
    this.pieces = []; // the texts of those, as they come
    this.begin = this.end = null; // milliseconds since the first token
    this.draftMs = 0;
  }

  get isFull() {
    return this.pieces.length >= this.gained;
  }

  get rejected() {
    return this.guesses.length - this.accepted.length;
  }

  // Levels of the draft: what a chain's length is to a tree.
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

  // The draft tokens that would have come next: after the last accepted one, the first branch.
  get missed() {
    const taken = new Set(this.accepted);
    const branch = [];
    let [next] = this.childrenOf(this.accepted.at(-1) ?? -1).filter((node) => !taken.has(node));
    while (next !== undefined) {
      branch.push(next);
      [next] = this.childrenOf(next);
    }
    return branch;
  }

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
    this.timed = 0; // passes whose times are known
    this.filling = 0; // the pass whose tokens arrive
    this.began = this.now = null; // of this page's clock, until the engine's own arrives
  }

  // Take an event; returns its texts as [pass or null, text, place among the pass's tokens].
  note(event) {
    this.now = performance.now();
    this.began ??= this.now;
    if (event.timings) this.timings = event.timings;
    if (event.speculation?.method) this.name = event.speculation.method; // who it really was
    if (!event.origin) return [];
    const { pieces, passes = [], progress } = event.origin;
    for (const shown of passes) this.passes.push(new Pass(this.passes.length, shown));
    this.tokenIds.push(...event.token_ids);
    this.text += event.text;
    const placed = pieces.map((piece) => this.place(piece, event.token_ids.length > 0));
    if (progress) this.time(progress);
    return placed;
  }

  place(piece, isToken) {
    if (!this.passes.length) return [null, piece, 0];
    while (this.filling < this.passes.length - 1 && this.passes[this.filling].isFull) this.filling += 1;
    const pass = this.passes[this.filling];
    if (isToken) pass.pieces.push(piece);
    return [pass, piece, Math.max(pass.pieces.length - 1, 0)];
  }

  // The passes that have no time yet share what has gone by.
  time(progress) {
    const before = this.progress ?? { decode_ms: progress.decode_ms, draft_ms: progress.draft_ms };
    const fresh = this.passes.slice(this.timed);
    this.timed = this.passes.length;
    const part = (name) => (progress[name] - before[name]) / fresh.length;
    fresh.forEach((pass, place) => {
      pass.begin = before.decode_ms + place * part("decode_ms");
      pass.end = pass.begin + part("decode_ms");
      pass.draftMs = part("draft_ms");
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
    const first = this.passes[0]?.gained ?? 1; // its tokens took no time of decoding
    return this.tokens > first && this.seconds > 0 ? (this.tokens - first) / this.seconds : 0;
  }

  get line() {
    const passes = this.progress ? ` in ${this.progress.passes} passes` : "";
    return `${this.tokens} tokens${passes}, ${this.seconds.toFixed(2)} s, ${this.rate.toFixed(1)} per second`;
  }
}
