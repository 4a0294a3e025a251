// All passes at a glance, a column for each: from below, the accepted draft tokens, the target's own token and the
// rejected draft tokens.

import { shape } from "./svg.js";

const MIN_COLUMNS = 24; // width in columns; more passes make it wider
const GAP = 0.14; // between two cells, as a fraction of a cell

export class Overview {
  constructor(picture, choose) {
    this.picture = picture;
    this.marker = shape("rect", { class: "marker", y: 0, width: 1, height: 0 });
    picture.addEventListener("click", (click) => {
      const box = picture.getBoundingClientRect();
      const index = Math.floor(((click.clientX - box.left) / box.width) * this.columns);
      if (index < this.count) choose(index);
    });
    this.clear();
  }

  clear() {
    this.count = 0;
    this.highest = 1;
    this.marker.setAttribute("width", "0");
    this.picture.replaceChildren(this.marker);
  }

  get columns() {
    return Math.max(this.count, MIN_COLUMNS);
  }

  add(pass) {
    this.count += 1;
    const own = pass.gained - pass.accepted.length;
    const x = pass.index + GAP / 2;
    this.column("accepted", x, 0, pass.accepted.length);
    this.column("own", x, pass.accepted.length, own);
    this.column("rejected", x, pass.accepted.length + own, pass.rejected);
    this.highest = Math.max(this.highest, pass.accepted.length + own + pass.rejected);
    this.picture.setAttribute("viewBox", `0 ${-this.highest} ${this.columns} ${this.highest}`);
  }

  column(kind, x, from, cells) {
    if (!cells) return;
    const width = 1 - GAP;
    let path = "";
    for (let cell = from; cell < from + cells; cell += 1) path += `M${x} ${-cell - GAP / 2}h${width}v${GAP - 1}h${-width}z`;
    this.picture.append(shape("path", { class: kind, d: path }));
  }

  select(index) {
    const shown = index !== null && index < this.count;
    this.marker.setAttribute("x", shown ? String(index) : "0");
    this.marker.setAttribute("y", String(-this.highest));
    this.marker.setAttribute("height", String(this.highest));
    this.marker.setAttribute("width", shown ? "1" : "0");
  }
}
