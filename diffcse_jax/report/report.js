"use strict";
// Shows the values under the pointer beside the lines' names; they are read from the table of the chart's numbers.
for (const chart of document.querySelectorAll("figure[data-axis]")) {
  const picture = chart.querySelector(":scope > svg");
  const cursor = picture.querySelector(".cursor");
  const outputs = chart.querySelectorAll("output");
  const [low, high, start, end] = chart.dataset.axis.split(" ").map(Number);
  const number = (text) => Number(text.replace("\u2212", "-").replaceAll(",", ""));
  let rows = null; // read when the pointer first comes
  const read = () => [...chart.querySelectorAll("tbody tr")].map((row) => {
    const [x, ...ys] = [...row.cells].map((cell) => cell.textContent);
    return { x: number(x), ys };
  });
  const nearest = (x, line) => {
    const known = rows.filter((row) => row.ys[line] !== "");
    return known.reduce((best, row) => (Math.abs(row.x - x) < Math.abs(best.x - x) ? row : best), known[0]);
  };
  picture.addEventListener("pointermove", (event) => {
    rows ??= read();
    const box = picture.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * picture.viewBox.baseVal.width;
    const x = low + ((pixel - start) / (end - start)) * (high - low);
    const found = [...outputs].map((_, line) => nearest(x, line));
    if (!found.length || !found[0]) return;
    outputs.forEach((output, line) => {
      if (found[line]) output.textContent = `${found[line].ys[line]} at ${found[line].x.toLocaleString("en", { maximumFractionDigits: 3 })}`;
    });
    const at = start + ((found[0].x - low) / (high - low)) * (end - start);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    picture.classList.add("pointed");
  });
  picture.addEventListener("pointerleave", () => {
    picture.classList.remove("pointed");
    outputs.forEach((output) => { output.textContent = ""; });
  });
}
