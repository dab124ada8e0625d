"use strict";
// What a part of a picture stands for, above the part. Everything said here is in the tables too.
const tip = document.getElementById("tip");

document.addEventListener("pointermove", (event) => {
  const part = event.target.closest("[data-tip]");
  tip.hidden = !part;
  if (!part) return;
  tip.textContent = part.dataset.tip;
  const right = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(4, Math.min(event.clientX, right))}px`;
  tip.style.top = `${part.getBoundingClientRect().top + scrollY - tip.offsetHeight - 6}px`;
});
