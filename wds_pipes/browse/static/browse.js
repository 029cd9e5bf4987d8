// Keys: each link with data-key is followed by its key; in a grid, j and k move between the samples.
"use strict";
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT|AUDIO|VIDEO)$/.test(event.target.tagName)) return;
  if (event.key === "/") {
    const go = document.getElementById("go");
    if (go) {
      event.preventDefault();
      go.focus();
    }
    return;
  }
  if (!/^[a-z]$/.test(event.key)) return;
  const link = document.querySelector(`a[data-key="${event.key}"]`);
  if (link) {
    link.click();
    return;
  }
  const items = [...document.querySelectorAll("a.item")];
  const step = { j: 1, k: -1 }[event.key];
  if (!step || !items.length) return;
  const at = items.indexOf(document.activeElement);
  const next = items[at < 0 ? (step > 0 ? 0 : items.length - 1) : Math.min(Math.max(at + step, 0), items.length - 1)];
  next.focus();
  (next.closest(".card") || next).scrollIntoView({ block: "nearest" });
});
