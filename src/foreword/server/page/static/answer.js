// The view of an answer: its tokens, bracketed by pass and coloured by origin, with the rejected draft tokens between them.

import { FenceReader, element, inline, tokenSpan, visible } from "./text.js";

const tip = document.getElementById("tip");
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
const MAX_TIP_TOKENS = 16;
const MAX_GHOSTS = 6; // rejected draft tokens shown in the text; the picture of the pass shows all

export class AnswerView {
  // `choose` receives the index of the pass at which the user points.
  constructor(article, choose) {
    this.article = article;
    this.title = article.querySelector("h2");
    this.figures = article.querySelector(".figures");
    this.text = article.querySelector(".text");
    this.choose = choose;
    this.text.addEventListener("keydown", (press) => this.moveFocus(press));
    this.text.addEventListener("pointerover", (over) => over.pointerType === "mouse" && this.showTip(over.target));
    this.text.addEventListener("pointerout", hideTip);
    this.text.addEventListener("focusin", (focus) => {
      this.chooseAt(focus.target);
      if (focus.target.matches(":focus-visible")) this.showTip(focus.target);
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

  // Append texts, as `Run.note` returns them.
  add(placed) {
    for (const [pass, piece, index] of placed) {
      const token = tokenSpan(piece, pass ? "token" : "");
      token.classList.toggle("code", this.fences.push(piece));
      if (pass) this.addToken(pass, token, index);
      else this.text.append(token);
    }
  }

  // The rejected draft tokens are between the accepted ones and the target's own token.
  addToken(pass, token, index) {
    const span = this.spans[pass.index] ?? this.addPass(pass);
    const accepted = pass.accepted.length;
    token.classList.add(index < accepted ? "accepted" : "own");
    if (index === accepted && accepted === 0) span.append(...ghosts(pass));
    span.append(token);
    if (index === accepted - 1) span.append(...ghosts(pass));
  }

  addPass(pass) {
    const span = element("span", "pass");
    span.tabIndex = pass.index ? -1 : 0; // Tab stops only at the first pass; arrow keys move between passes
    span.setAttribute("role", "group");
    span.setAttribute("aria-label", summary(pass));
    span.classList.toggle("lone", pass.gained === 1 && !pass.draftTokens.length); // a single token without a bracket
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

  // Show the answer as it was at a time: the pass in flight shows only its draft tokens, later passes nothing. null: all.
  showTime(time) {
    this.text.classList.toggle("replaying", time !== null);
    this.passes.forEach((pass, index) => {
      const state = time === null || pass.end === null || pass.end <= time ? "" : pass.begin <= time ? "pending" : "future";
      this.spans[index].classList.toggle("pending", state === "pending");
      this.spans[index].classList.toggle("future", state === "future");
    });
  }

  moveFocus(press) {
    const here = this.spans.indexOf(press.target);
    if (!(press.key in STEPS) || here < 0) return;
    press.preventDefault();
    const next = this.spans[here + STEPS[press.key]];
    if (!next) return;
    press.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  chooseAt(target) {
    const index = this.spans.indexOf(target.closest(".pass"));
    if (index >= 0) this.choose(index);
  }

  showTip(target) {
    const index = this.spans.indexOf(target.closest(".pass"));
    const pass = this.passes[index];
    if (!pass?.rejected) return;
    const accepted = new Set(pass.accepted);
    const rejected = pass.draftTokens.filter((_, node) => !accepted.has(node));
    const parts = rejected.slice(0, MAX_TIP_TOKENS).flatMap((token) => [element("s", "", visible(token)), " "]);
    if (rejected.length > MAX_TIP_TOKENS) parts.push(`and ${rejected.length - MAX_TIP_TOKENS} more`);
    tip.replaceChildren("rejected: ", ...parts);
    tip.hidden = false;
    const rectangles = this.spans[index].getClientRects();
    const lastLine = rectangles[rectangles.length - 1];
    const left = Math.min(lastLine.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(left, 8) + scrollX}px`;
    tip.style.top = `${lastLine.bottom + 6 + scrollY}px`;
  }
}

export function hideTip() {
  tip.hidden = true;
}

export function summary(pass) {
  if (!pass.draftTokens.length) return `pass ${pass.index + 1}: no draft tokens`;
  return `pass ${pass.index + 1}: ${pass.accepted.length} of ${pass.draftTokens.length} draft tokens accepted`;
}

// Rejected draft tokens in the text. The style sheet draws them, so that a copied answer does not contain them.
function ghosts(pass) {
  const missed = pass.missed.slice(0, MAX_GHOSTS);
  const shown = missed.map((node) => ghost(inline(pass.draftTokens[node]), "ghost"));
  const others = pass.rejected - missed.length;
  return others ? [...shown, ghost(`+${others}`, "ghost others")] : shown;
}

function ghost(text, className) {
  const made = element("span", className);
  made.dataset.token = text;
  return made;
}
