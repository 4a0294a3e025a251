// Texts of tokens as HTML elements. The model's output is inserted as text, never as markup.

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// The text of a single draft token, with visible line breaks and spaces at its ends.
export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (found) => "␣".repeat(found.length)) || "∅";
}

// The text of a draft token within an answer, in one line and without wide spaces.
export function inline(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", " ").replace(/ {2,}/g, " ") || "∅";
}

// The element of a token of the answer: a line break stays one, and gets a visible sign that is not copied.
export function tokenSpan(piece, className) {
  const token = element("span", className);
  for (const part of piece.split(/(\n)/)) {
    if (part === "\n") token.append(element("span", "newline", part));
    else if (part) token.append(part);
  }
  return token;
}

// Detects whether the text so far ends inside a fenced block of code.
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
