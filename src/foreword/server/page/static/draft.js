// The picture of one pass: its draft tokens as a strip, or as a tree if they branch, and the target's own token.

import { element, visible } from "./text.js";

const at = (id) => document.getElementById(id);

// Show a pass; `pending`: it is not verified yet.
export function showDraft(pass, { pending = false } = {}) {
  const holder = at("draft-picture");
  at("draft").hidden = !pass;
  if (!pass) {
    holder.style.minHeight = "";
    return;
  }
  at("draft-title").textContent = `Pass ${pass.index + 1}`;
  at("draft-about").textContent = about(pass, pending);
  const picture = pass.branches ? tree(pass, pending) : strip(pass, pending);
  picture.classList.toggle("pending", pending);
  holder.replaceChildren(picture);
  holder.style.minHeight = `${holder.offsetHeight}px`; // never shrinks, so that the text below does not move
}

function about(pass, pending) {
  const count = `${pass.draftTokens.length} ${pass.draftTokens.length === 1 ? "draft token" : "draft tokens"}`;
  if (pending) return pass.draftTokens.length ? `${count}, not verified yet` : "no draft tokens, one token to come";
  const time = pass.end > pass.begin ? `, ${(pass.end - pass.begin).toFixed(1)} ms` : "";
  const outcome = pass.draftTokens.length ? `${count}, ${pass.accepted.length} accepted` : "no draft tokens";
  return `${outcome}, ${pass.gained} ${pass.gained === 1 ? "token" : "tokens"} gained${time}`;
}

function strip(pass, pending) {
  const row = element("ol", "strip");
  pass.draftTokens.forEach((_, node) => row.append(item(cell(pass, node, pending))));
  if (pass.own !== null && !pending) row.append(item(ownCell(pass)));
  return row;
}

function tree(pass, pending) {
  const root = element("ul", "tree");
  root.append(...branch(pass, -1, pending));
  return root;
}

function branch(pass, node, pending) {
  const last = pass.accepted.at(-1) ?? -1;
  const items = pass.childrenOf(node).map((child) => {
    const made = item(cell(pass, child, pending));
    const below = branch(pass, child, pending);
    if (below.length) {
      const list = element("ul");
      list.append(...below);
      made.append(list);
    }
    return made;
  });
  if (node === last && pass.own !== null && !pending) items.push(item(ownCell(pass)));
  return items;
}

function item(content) {
  const made = element("li");
  made.append(content);
  return made;
}

function cell(pass, node, pending) {
  if (pending) return element("span", "cell unverified", visible(pass.draftTokens[node]));
  if (pass.accepted.includes(node)) return element("span", "cell accepted", visible(pass.draftTokens[node]));
  return element("s", "cell rejected", visible(pass.draftTokens[node]));
}

function ownCell(pass) {
  return element("span", "cell own", visible(pass.own));
}
