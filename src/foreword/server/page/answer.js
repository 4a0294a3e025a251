// One answer on the page: its tokens, coloured by origin, and the guesses that were rejected on the way.
// Whatever the model says is put in as text, never as markup.

const tip = document.getElementById("tip");

export class AnswerView {
  constructor(article) {
    this.article = article;
    this.title = article.querySelector("h2");
    this.figures = article.querySelector(".figures");
    this.text = article.querySelector(".text");
    this.text.addEventListener("keydown", (press) => this.move(press));
    for (const [name, act] of [["pointerover", show], ["focusin", show], ["pointerout", hide], ["focusout", hide]]) {
      this.text.addEventListener(name, act);
    }
    this.clear();
  }

  clear() {
    this.text.replaceChildren();
    this.figures.textContent = "";
    this.tokenIds = [];
    this.written = "";
    hide();
  }

  set busy(on) {
    this.text.setAttribute("aria-busy", String(on));
  }

  add(event) {
    const { pieces, from_draft: fromDraft, rejected = [] } = event.origin;
    const missedAt = Math.min(fromDraft ?? 0, pieces.length - 1);
    pieces.forEach((piece, place) => {
      const token = document.createElement("span");
      token.textContent = piece;
      if (fromDraft !== undefined) token.className = place < fromDraft ? "token draft" : "token own";
      if (rejected.length && place === missedAt) this.mark(token, rejected);
      this.text.append(token);
    });
    this.tokenIds.push(...event.token_ids);
    this.written += event.text;
  }

  mark(token, rejected) {
    token.classList.add("missed");
    token.classList.toggle("blank", token.textContent.trim() === "");
    token.rejected = rejected;
    token.tabIndex = this.text.querySelector(".missed") ? -1 : 0; // one stop for Tab; arrows go on from there
    token.setAttribute("aria-describedby", "tip");
  }

  move(press) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (!(press.key in steps) || !press.target.rejected) return;
    press.preventDefault();
    const marked = [...this.text.querySelectorAll(".missed")];
    const next = marked[marked.indexOf(press.target) + steps[press.key]];
    if (!next) return;
    press.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function show(happened) {
  const token = happened.target;
  if (!token.rejected) return;
  const guesses = token.rejected.flatMap((guess) => {
    const struck = document.createElement("s");
    struck.textContent = visible(guess);
    return [struck, " "];
  });
  tip.replaceChildren("rejected: ", ...guesses);
  tip.hidden = false;
  const [place] = token.getClientRects().length ? token.getClientRects() : [token.getBoundingClientRect()];
  const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(left, 8) + scrollX}px`;
  tip.style.top = `${place.bottom + 6 + scrollY}px`;
}

export function hide() {
  tip.hidden = true;
}

function visible(guess) {
  return guess.replaceAll("\n", "⏎").replace(/^ | $/g, "␣") || "(nothing)";
}
