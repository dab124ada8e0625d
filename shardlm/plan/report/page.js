"use strict";
// What a part of a picture stands for, beside the pointer or the focused element.
const tip = document.getElementById("tip");

function show(event) {
  const part = event.target.closest("[data-tip]");
  tip.hidden = !part;
  if (!part) return;
  tip.textContent = part.dataset.tip;
  const box = part.getBoundingClientRect();
  const x = event.clientX ?? box.left, y = box.top + scrollY;
  tip.style.left = `${Math.max(4, Math.min(x, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y - tip.offsetHeight - 6}px`;
}

for (const kind of ["pointermove", "focusin"]) document.addEventListener(kind, show);
document.addEventListener("focusout", () => (tip.hidden = true));
