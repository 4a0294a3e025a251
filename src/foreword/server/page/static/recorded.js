// A recorded race: shown, and played on request, until the user's first run replaces it.

import { get } from "./events.js";
import { Race } from "./race.js";

class RecordedRun {
  constructor({ name, passes }) {
    this.name = name;
    this.passes = passes.map(([end, accepted, gained], index) => ({
      begin: index ? passes[index - 1][0] : 0, end, gained, accepted: Array(accepted),
    }));
    this.showAt(null);
  }

  // Show the run as it was at a time, in milliseconds since the first token; null: the whole run.
  showAt(time) {
    const done = this.passes.findIndex((pass) => time !== null && pass.end > time);
    this.timed = done < 0 ? this.passes.length : done;
  }

  get tokens() {
    return this.passes.slice(0, this.timed).reduce((sum, pass) => sum + pass.gained, 0);
  }

  get seconds() {
    return (this.passes[this.timed - 1]?.end ?? 0) / 1e3;
  }

  get duration() {
    return this.passes.at(-1).end;
  }
}

export class RecordedRace {
  constructor(section) {
    this.section = section;
    this.race = new Race(section);
    this.isOver = false; // true: a run of the user has replaced the recorded race
    section.querySelector("button").addEventListener("click", () => this.play());
  }

  async show() {
    const { model, machine, date, runs } = await get("page/recorded.json");
    this.runs = runs.map((run) => new RecordedRun(run));
    const [drafted, plain] = this.runs;
    const faster = (plain.duration / drafted.duration).toFixed(2);
    this.section.querySelector(".about").textContent =
      `Recorded on ${date}: ${model} on ${machine}. The same ${plain.tokens} tokens in ${drafted.passes.length} passes ` +
      `instead of ${plain.passes.length}: ${faster} times as fast. Your own run replaces it.`;
    this.draw(null);
    this.section.hidden = this.isOver;
  }

  draw(time) {
    this.race.clear();
    for (const run of this.runs) run.showAt(time);
    this.race.draw(this.runs);
    this.race.showTime(time);
  }

  play() {
    const began = performance.now();
    this.began = began;
    const tick = (now) => {
      if (this.isOver || this.began !== began) return;
      const time = now - began;
      this.draw(time < this.race.length ? Math.max(time, 0) : null);
      if (time < this.race.length) requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  end() {
    this.isOver = this.section.hidden = true;
  }
}
