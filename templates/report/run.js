"use strict";
// Keeps folds and place over a reload, and opens what a link leads to.
(() => {
  const folds = [...document.querySelectorAll("details")];
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    if (target) target.scrollIntoView({block: "center"});
  };
  const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "null");
  if (kept && kept.hash === location.hash) {
    folds.forEach((fold, at) => { fold.open = kept.open[at] ?? fold.open; });
    scrollTo(0, kept.y);
  } else reveal();
  addEventListener("hashchange", reveal);
  addEventListener("pagehide", () => sessionStorage.setItem(location.pathname, JSON.stringify({y: scrollY, hash: location.hash, open: folds.map((fold) => fold.open)})));
})();
