// What the tests ask of a page at one width: a JSON string. Lengths in CSS pixels.
(() => {
  const box = (element) => { const b = element.getBoundingClientRect(); return [b.width, b.height]; };
  const rgb = (text) => {
    const parts = text.match(/[\d.]+/g).map(Number);
    return { c: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1 };
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) =>
      v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgb(getComputedStyle(e).backgroundColor);
      if (found.alpha > 0) return found.c;
    }
    return [255, 255, 255];
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)];
    return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  };
  const faint = [];
  for (const e of document.querySelectorAll("main *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.tagName === "style") continue;
    const style = getComputedStyle(e);
    const inChart = e.closest("svg") !== null;
    const declared = e.getAttribute("style") || "";
    // Numbers inside the cells of a heat map lie on the cells, not on the page.
    if (inChart && /fill: #(111111|ffffff)/.test(declared)) continue;
    const ratio = contrast(rgb(inChart ? style.fill : style.color).c, ground(e));
    if (ratio < 4.5) faint.push([e.textContent.slice(0, 40), ratio]);
  }
  const charts = [...document.querySelectorAll("svg")].map((svg) => ({
    name: svg.getAttribute("aria-label"),
    box: box(svg),
    drawn: [...svg.querySelectorAll("path, use")].filter((p) => {
      const [w, h] = box(p);
      return w + h > 2 && getComputedStyle(p).display !== "none";
    }).length,
    words: [...svg.querySelectorAll("text")].map((t) => t.textContent.trim()).filter(Boolean),
    smallest: Math.min(...[...svg.querySelectorAll("text")].map((t) => box(t)[1])),
    outside: [...svg.querySelectorAll("text")].filter((t) => {
      const [inner, outer] = [t.getBoundingClientRect(), svg.getBoundingClientRect()];
      return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    }).map((t) => t.textContent),
  }));
  const tables = [...document.querySelectorAll("table")].map((table) => {
    const wrap = table.parentElement;
    // Where the columns end before anyone scrolls.
    const columns = [...table.querySelectorAll("tbody tr:first-child td")].map((td) =>
      td.getBoundingClientRect().right);
    wrap.scrollLeft = 1e6;
    wrap.scrollTop = 1e6;
    const reached = wrap.scrollLeft + wrap.clientWidth;
    const last = table.querySelector("tbody tr:last-child td:last-child").getBoundingClientRect();
    const view = wrap.getBoundingClientRect();
    const seen = last.right <= view.right + 1 && last.bottom <= view.bottom + 1
      && last.width > 0 && last.height > 0;
    const head = table.querySelector("th").getBoundingClientRect();
    const named = head.top >= view.top - 1 && head.bottom <= view.bottom;
    wrap.scrollLeft = 0;
    wrap.scrollTop = 0;
    return {
      caption: table.caption.textContent,
      box: box(wrap),
      table: box(table),
      reached,
      overflow: getComputedStyle(wrap).overflowX,
      lastCellSeen: seen,
      headingsSeen: named,
      columns,
      headings: [...table.querySelectorAll("th")].map((th) => th.textContent),
      rows: [...table.querySelectorAll("tbody tr")].map((row) => box(row)[1]),
      clipped: [...table.querySelectorAll("td")].filter((td) => td.scrollWidth > td.clientWidth + 1)
        .map((td) => td.textContent),
      font: Math.min(...[...table.querySelectorAll("td")].map((td) =>
        parseFloat(getComputedStyle(td).fontSize))),
      described: table.caption !== null && table.querySelectorAll("th[scope=col]").length > 0,
    };
  });
  return JSON.stringify({
    viewport: document.documentElement.clientWidth,
    page: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    ground: ground(document.body),
    hurt: window.hurt || null,
    foreign: document.querySelectorAll("script, img, a, iframe, object, link").length,
    text: document.querySelector("main").textContent,
    faint, charts, tables,
  });
})()
