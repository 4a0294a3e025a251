// One answer on the page: its tokens, bracketed by pass and coloured by origin, with the rejected draft tokens between them.

import { FenceReader, element, inline, tokenSpan, visible } from "./text.js";

const tip = document.getElementById("tip");
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
const TIP_GUESSES = 16;
const MOST_GHOSTS = 6; // more would drown the text; the picture of the pass has them all

export class AnswerView {
  // `choose` gets the number of a pass that the reader points at.
  constructor(article, choose) {
    this.article = article;
    this.title = article.querySelector("h2");
    this.figures = article.querySelector(".figures");
    this.text = article.querySelector(".text");
    this.choose = choose;
    this.text.addEventListener("keydown", (press) => this.move(press));
    this.text.addEventListener("pointerover", (over) => over.pointerType === "mouse" && this.showTip(over.target));
    this.text.addEventListener("pointerout", hideTip);
    this.text.addEventListener("focusin", (got) => {
      this.point(got.target);
      if (got.target.matches(":focus-visible")) this.showTip(got.target);
    });
    this.text.addEventListener("focusout", hideTip);
    this.clear();
  }

  clear() {
    this.text.replaceChildren();
    this.text.classList.remove("replaying");
    this.figures.textContent = "";
    this.spans = []; // one per pass
    this.passes = [];
    this.fences = new FenceReader();
    hideTip();
  }

  set busy(on) {
    this.text.setAttribute("aria-busy", String(on));
  }

  add(placed) {
    for (const [pass, piece, place] of placed) {
      const token = tokenSpan(piece, pass ? "token" : "");
      token.classList.toggle("code", this.fences.push(piece));
      if (pass) this.put(pass, token, place);
      else this.text.append(token);
    }
  }

  put(pass, token, place) {
    const span = this.spans[pass.index] ?? this.open(pass);
    const right = pass.accepted.length;
    token.classList.add(place < right ? "accepted" : "own");
    if (place === right && right === 0) span.append(...ghosts(pass));
    span.append(token);
    if (place === right - 1) span.append(...ghosts(pass));
  }

  open(pass) {
    const span = element("span", "pass");
    span.tabIndex = pass.index ? -1 : 0; // one stop for Tab; arrows go on from there
    span.setAttribute("role", "group");
    span.setAttribute("aria-label", summary(pass));
    span.classList.toggle("lone", pass.gained === 1 && !pass.guesses.length); // nothing to bracket
    if (pass.rejected) {
      span.classList.add("missed");
      span.setAttribute("aria-describedby", "tip");
    }
    this.spans.push(span);
    this.passes.push(pass);
    this.text.append(span);
    return span;
  }

  select(index) {
    this.text.querySelector(".selected")?.classList.remove("selected");
    this.spans[index]?.classList.add("selected");
  }

  // As it was at a time: passes that are not verified yet show only their draft tokens, later ones nothing. null: all.
  showTime(time) {
    this.text.classList.toggle("replaying", time !== null);
    this.passes.forEach((pass, index) => {
      const state = time === null || pass.end === null || pass.end <= time ? "" : pass.begin <= time ? "pending" : "future";
      this.spans[index].classList.toggle("pending", state === "pending");
      this.spans[index].classList.toggle("future", state === "future");
    });
  }

  move(press) {
    const here = this.spans.indexOf(press.target);
    if (!(press.key in STEPS) || here < 0) return;
    press.preventDefault();
    const next = this.spans[here + STEPS[press.key]];
    if (!next) return;
    press.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  point(target) {
    const index = this.spans.indexOf(target.closest(".pass"));
    if (index >= 0) this.choose(index);
  }

  showTip(target) {
    const index = this.spans.indexOf(target.closest(".pass"));
    const pass = this.passes[index];
    if (!pass?.rejected) return;
    const taken = new Set(pass.accepted);
    const struck = pass.guesses.filter((_, node) => !taken.has(node));
    const parts = struck.slice(0, TIP_GUESSES).flatMap((guess) => [element("s", "", visible(guess)), " "]);
    if (struck.length > TIP_GUESSES) parts.push(`and ${struck.length - TIP_GUESSES} more`);
    tip.replaceChildren("rejected: ", ...parts);
    tip.hidden = false;
    const rectangles = this.spans[index].getClientRects();
    const place = rectangles[rectangles.length - 1];
    const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(left, 8) + scrollX}px`;
    tip.style.top = `${place.bottom + 6 + scrollY}px`;
  }
}

export function hideTip() {
  tip.hidden = true;
}

export function summary(pass) {
  if (!pass.guesses.length) return `pass ${pass.index + 1}: no draft tokens`;
  return `pass ${pass.index + 1}: ${pass.accepted.length} of ${pass.guesses.length} draft tokens accepted`;
}

// Draft tokens are drawn by the style sheet, so that a copied answer does not contain them.
function ghosts(pass) {
  const missed = pass.missed.slice(0, MOST_GHOSTS);
  const shown = missed.map((node) => ghost(inline(pass.guesses[node]), "ghost"));
  const others = pass.rejected - missed.length;
  return others ? [...shown, ghost(`+${others}`, "ghost others")] : shown;
}

function ghost(text, className) {
  const made = element("span", className);
  made.dataset.guess = text;
  return made;
}
