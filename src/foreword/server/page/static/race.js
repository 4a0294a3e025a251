// Both runs on one time axis: a bar for each pass, as wide as its time and as high as its committed tokens.

import { shape } from "./svg.js";
import { element } from "./text.js";

const TICKS = 5;
const LAST_TICK = 0.93; // fraction of the axis, so that there is room for the last label

export class Race {
  // `section` contains two lanes, an axis below them and a cursor over them.
  constructor(section) {
    this.ticks = section.querySelector(".axis");
    this.cursor = section.querySelector(".cursor");
    this.lanes = [...section.querySelectorAll(".lane")].map((lane) => ({
      picture: lane.querySelector("svg"), label: lane.querySelector(".label"), result: lane.querySelector(".result"),
    }));
    this.clear();
  }

  clear() {
    this.runs = [];
    this.drawn = [0, 0]; // passes drawn in each lane
    this.tallest = 1;
    for (const { picture, label, result } of this.lanes) {
      picture.replaceChildren();
      label.textContent = result.textContent = "";
    }
    this.ticks.replaceChildren();
    this.showTime(null);
  }

  get length() {
    return Math.max(...this.runs.map((run) => run.duration), 1);
  }

  // Draw the passes that were added since the last call.
  draw(runs) {
    this.runs = runs;
    runs.forEach((run, lane) => {
      for (; this.drawn[lane] < run.timed; this.drawn[lane] += 1) this.bar(lane, run.passes[this.drawn[lane]]);
      this.lanes[lane].label.textContent = run.name;
      this.lanes[lane].result.textContent = `${run.tokens} tokens · ${run.seconds.toFixed(2)} s`;
    });
    for (const { picture } of this.lanes) picture.setAttribute("viewBox", `0 ${-this.tallest} ${this.length} ${this.tallest}`);
    this.axis();
  }

  bar(lane, pass) {
    const { picture } = this.lanes[lane];
    const width = Math.max(pass.end - pass.begin, 0);
    const accepted = pass.accepted.length;
    const own = pass.gained - accepted;
    this.tallest = Math.max(this.tallest, pass.gained);
    const column = { x: pass.begin, width };
    if (accepted) picture.append(shape("rect", { ...column, class: "accepted", y: -accepted, height: accepted }));
    if (own) picture.append(shape("rect", { ...column, class: "own", y: -accepted - own, height: own }));
    picture.append(shape("line", { class: "edge", x1: pass.end, x2: pass.end, y1: 0, y2: -pass.gained }));
  }

  axis() {
    const step = niceStep(this.length / TICKS);
    const ticks = [];
    for (let time = 0; time <= LAST_TICK * this.length; time += step) {
      const tick = element("span", "tick", time < 1000 && step < 100 ? `${time} ms` : `${(time / 1e3).toFixed(1)} s`);
      tick.style.left = `${(100 * time) / this.length}%`;
      ticks.push(tick);
    }
    this.ticks.replaceChildren(...ticks);
  }

  showTime(time) {
    this.cursor.hidden = time === null;
    if (time !== null) this.cursor.style.left = `${(100 * Math.min(time, this.length)) / this.length}%`;
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}
