// Texts of tokens, made visible. Whatever the model says is put in as text, never as markup.

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// A draft token by itself: spaces at its ends and line breaks can be seen.
export function visible(guess) {
  return guess.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (found) => "␣".repeat(found.length)) || "∅";
}

// A draft token among the text: in one line, and not much wider than its words.
export function inline(guess) {
  return guess.replaceAll("\n", "⏎").replaceAll("\t", " ").replace(/ {2,}/g, " ") || "∅";
}

// A token of the text: a line break keeps its meaning and gets a sign, which is not part of what is copied.
export function tokenSpan(piece, className) {
  const token = element("span", className);
  for (const part of piece.split(/(\n)/)) {
    if (part === "\n") token.append(element("span", "newline", part));
    else if (part) token.append(part);
  }
  return token;
}

// Tells whether the text has reached a fenced block of code.
export class FenceReader {
  constructor() {
    this.inside = false;
    this.line = "";
  }

  push(piece) {
    const lines = (this.line + piece).split("\n");
    this.line = lines.pop();
    for (const line of lines) if (line.trimStart().startsWith("```")) this.inside = !this.inside;
    return this.inside;
  }
}
