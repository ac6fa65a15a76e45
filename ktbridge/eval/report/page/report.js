(() => {
  const box = document.getElementById("items");
  const controls = ["slice", "outcome", "order", "find"].map(id => document.getElementById(id));
  const [slice, outcome, order, find] = controls;
  const differ = document.getElementById("differ");
  const count = document.getElementById("count");
  const all = [...box.children].map(item => ({
    item, n: Number(item.dataset.n), text: null, outcomes: item.dataset.outcomes.split(" "),
  }));
  // Every order is "smallest first" of one number.
  const rank = entry => {
    const [key, sign] = { bench: ["n", 1], faulty: ["faulty", -1] }[order.value]
      ?? [order.value.slice(1), order.value[0] === "-" ? -1 : 1];
    return sign * Number(entry.item.dataset[key]);
  };
  const fits = entry => {
    if (slice.value && entry.item.dataset.slice !== slice.value) return false;
    const kinds = entry.outcomes;
    if (outcome.value === "whole" && kinds.join() !== "ok") return false;
    if (outcome.value && outcome.value !== "whole" && !kinds.includes(outcome.value)) return false;
    const wanted = find.value.trim().toLocaleLowerCase();
    if (!wanted) return true;
    entry.text ??= entry.item.textContent.toLocaleLowerCase();
    return entry.text.includes(wanted);
  };
  const show = () => {
    const ranked = all.map(entry => [rank(entry), entry]);
    ranked.sort(([a, x], [b, y]) => a - b || x.n - y.n);
    let shown = 0;
    for (const [, entry] of ranked) {
      entry.item.hidden = !fits(entry);
      shown += entry.item.hidden ? 0 : 1;
    }
    box.append(...ranked.map(([, entry]) => entry.item));
    count.textContent = `${shown} of ${all.length} items`;
    box.classList.toggle("differ", differ.checked);
  };
  // The view is in the address, so that it can be kept and sent.
  const read = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const one of controls) {
      const value = wanted.get(one.id);
      if (value !== null && (one === find || [...one.options].some(o => o.value === value))) one.value = value;
    }
    if (wanted.has("differ")) differ.checked = wanted.get("differ") !== "0";
    show();
  };
  const write = () => {
    const said = new URLSearchParams();
    for (const one of controls) if (one.value && one.value !== "bench") said.set(one.id, one.value);
    if (!differ.checked) said.set("differ", "0");
    history.replaceState(null, "", said.size ? `#${said}` : location.pathname + location.search);
    show();
  };
  let later = 0;
  for (const one of [slice, outcome, order, differ]) one.addEventListener("change", write);
  find.addEventListener("input", () => { clearTimeout(later); later = setTimeout(write, 150); });
  addEventListener("hashchange", read);
  addEventListener("keydown", event => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      event.preventDefault();
      find.focus();
    }
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
  read();
})();
