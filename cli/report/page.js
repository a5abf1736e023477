"use strict";
// Tooltips for what has data-tip, and one document lit up through all its pictures in a card.
const tip = document.getElementById("tip");

function light(element, on) {
  const figure = element.closest(".cover");
  const number = element.dataset.doc;
  if (!figure || !number || number === "0") return;
  figure.classList.toggle("focused", on);
  for (const part of figure.querySelectorAll(`[data-doc="${number}"]`)) part.classList.toggle("lit", on);
}

function show(element, x, y) {
  tip.textContent = element.dataset.tip;
  tip.hidden = false;
  const width = tip.offsetWidth;
  tip.style.left = `${Math.max(8, Math.min(x - width / 2, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, y - tip.offsetHeight - 14)}px`;
}

let shown = null;
function enter(element, x, y) {
  if (shown && shown !== element) leave();
  shown = element;
  light(element, true);
  show(element, x, y);
}
function enterAbove(element) {
  const box = element.getBoundingClientRect();
  enter(element, box.left + box.width / 2, box.top);
}
function leave() {
  if (shown) light(shown, false);
  shown = null;
  tip.hidden = true;
}

document.addEventListener("pointermove", (event) => {
  const element = event.target.closest("[data-tip]");
  if (element) enter(element, event.clientX, event.clientY);
  else if (shown && shown !== document.activeElement) leave();
});
document.addEventListener("focusin", (event) => {
  const element = event.target.closest("[data-tip]");
  if (!element) return leave();
  enterAbove(element);
});
document.addEventListener("focusout", leave);
// Moving the focus may scroll: its tooltip goes along.
const scrolled = () => (shown && shown === document.activeElement ? enterAbove(shown) : leave());
document.addEventListener("scroll", scrolled, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") leave();
});

const toggle = document.getElementById("toggle");
const texts = [...document.querySelectorAll("details.prompt-text")];
toggle.hidden = texts.length === 0;
toggle.addEventListener("click", () => {
  const open = texts.some((text) => !text.open);
  for (const text of texts) text.open = open;
  toggle.textContent = open ? "Close every text" : "Open every text";
});
