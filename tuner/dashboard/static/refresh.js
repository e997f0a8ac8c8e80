"use strict";
// Refresh the page in place: only what changed is replaced, so scroll position, focus, open tables and marked text stay.
(() => {
  const EVERY = 5000;
  const box = document.getElementById("live");
  const state = document.getElementById("refresh-state");
  let timer = 0;
  let asking = false;

  function keep(node) {
    if (node.nodeType !== Node.ELEMENT_NODE || !node.id) return null;
    return node;
  }

  // Make `old` like `fresh`. Elements of one id or place are kept and changed inside.
  function morph(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    const same = old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && (old.id || "") === (fresh.id || "");
    if (!same) { old.replaceWith(document.importNode(fresh, true)); return; }
    if (old.nodeType !== Node.ELEMENT_NODE) { old.nodeValue = fresh.nodeValue; return; }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !(old.nodeName === "DETAILS" && name === "open")) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const byId = new Map([...old.children].filter(keep).map((child) => [child.id, child]));
    let place = old.firstChild;
    for (const next of [...fresh.childNodes]) {
      const known = keep(next) && byId.get(next.id);
      if (known) {
        if (known !== place) old.insertBefore(known, place); else place = place.nextSibling;
        morph(known, next);
      } else if (place && !(keep(place) && fresh.querySelector(`#${CSS.escape(place.id)}`))) {
        const after = place.nextSibling;
        morph(place, next);
        place = after;
      } else {
        old.insertBefore(document.importNode(next, true), place);
      }
    }
    while (place) { const after = place.nextSibling; place.remove(); place = after; }
  }

  // Ask once, and then, as long as the box is checked, every five seconds: never two questions or timers at a time.
  async function refresh() {
    if (asking) return;
    asking = true;
    try {
      const answer = await fetch(location.pathname, { headers: { Accept: "text/html" }, credentials: "same-origin" });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      morph(document.getElementById("content"), page.getElementById("content"));
      document.getElementById("as-of").textContent = page.getElementById("as-of").textContent;
      if (state.textContent) state.textContent = "";
    } catch (error) {
      state.textContent = `Not refreshed: ${error.message}; tried again in 5 s.`;
    }
    asking = false;
    clearTimeout(timer);
    if (box.checked) timer = setTimeout(refresh, EVERY);
  }

  document.getElementById("live-label").hidden = false;
  box.checked = true;
  box.addEventListener("change", () => {
    clearTimeout(timer);
    if (box.checked) refresh();
  });
  timer = setTimeout(refresh, EVERY);
})();
