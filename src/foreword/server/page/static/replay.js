// Replays runs, more slowly or pass by pass. All runs share one clock, so that two of them race.

const at = (id) => document.getElementById(id);

export class Replay {
  // `show` receives the time in milliseconds since the first token; null: the end.
  constructor(show) {
    this.show = show;
    at("replay-back").addEventListener("click", () => this.step(-1));
    at("replay-forward").addEventListener("click", () => this.step(1));
    at("replay-play").addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    at("replay-end").addEventListener("click", () => this.finish());
    at("replay-time").addEventListener("input", () => {
      this.pause();
      this.seek(at("replay-time").valueAsNumber);
    });
    this.clear();
  }

  clear() {
    this.pause();
    this.time = null;
    at("replay").hidden = true;
  }

  load(runs) {
    this.pause();
    this.time = null;
    this.stops = [...new Set(runs[0].passes.map((pass) => pass.end))]; // where `step` stops
    this.length = Math.max(...runs.map((run) => run.duration));
    at("replay").hidden = this.stops.length < 2;
    at("replay-time").max = this.length;
    at("replay-time").step = this.length / 1000;
    this.update();
  }

  play() {
    if (this.time === null || this.time >= this.length) this.time = 0;
    this.playing = true;
    let lastFrame = null;
    const tick = (now) => {
      if (!this.playing) return;
      const passed = lastFrame === null ? 0 : now - lastFrame;
      lastFrame = now;
      this.time += passed * Number(at("replay-speed").value);
      if (this.time >= this.length) this.finish();
      else {
        this.seek(this.time);
        requestAnimationFrame(tick);
      }
    };
    this.update();
    requestAnimationFrame(tick);
  }

  pause() {
    this.playing = false;
    at("replay-play").textContent = "▶ Replay";
  }

  finish() {
    this.pause();
    this.seek(null);
  }

  // Go to the end of the previous pass (-1) or of the next one (1).
  step(direction) {
    this.pause();
    const now = this.time ?? this.length;
    const next = direction > 0 ? this.stops.find((stop) => stop > now) : this.stops.findLast((stop) => stop < now);
    if (next !== undefined) this.seek(next);
    else if (direction > 0) this.finish();
  }

  seek(time) {
    this.time = time;
    this.show(time);
    this.update();
  }

  // Show the state of the replay in its controls.
  update() {
    if (this.playing) at("replay-play").textContent = "⏸ Pause";
    const now = this.time ?? this.length;
    const done = this.stops.filter((stop) => stop <= now).length;
    at("replay-time").value = now;
    at("replay-place").textContent = `pass ${done} of ${this.stops.length} · ${now.toFixed(0)} ms`;
  }
}
