"use strict";
// "/" goes to the search box, from anywhere on the page; Escape empties it.
const box = document.getElementById("q");
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    box.focus();
    box.select();
  } else if (event.key === "Escape" && document.activeElement === box) {
    box.value = "";
  }
});
