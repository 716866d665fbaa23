"""The style of a page, and the script that steps through the frames of its videos."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --mark: #0a7d5a; --warn: #c60; }
@media (prefers-color-scheme: dark) { :root { --mark: #4fd0a5; --warn: #f0a050; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1160px; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, pre:focus-visible, a:focus-visible, button:focus-visible, input:focus-visible,
summary:focus-visible {
  outline: 2px solid var(--mark); outline-offset: 2px; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } tbody th { font-weight: 400; }
th:first-child, td:first-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { opacity: .75; } dd { margin: 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.note { border-left: 3px solid var(--warn); padding-left: .7rem; }
.caption, figcaption { font-size: .85rem; opacity: .8; }
.caches { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: .8rem 2rem; }
.shots { display: grid; grid-template-columns: repeat(3, minmax(0, 240px)); gap: .3rem .8rem; }
.caches p { margin: .2rem 0; }
figure { margin: 0; min-width: 0; } figcaption { overflow-wrap: anywhere; }
figure img, .film { width: 100%; display: block; background: var(--soft); }
img.small, .film.small { image-rendering: pixelated; }
.strip { font-family: ui-monospace, monospace; letter-spacing: .05em; color: var(--mark); overflow-wrap: anywhere; }
svg.bars { width: 100%; height: 90px; max-width: 720px; display: block; background: var(--soft); fill: var(--mark); }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); gap: .8rem 1.5rem; }
.answers pre { margin: 0; padding: .5rem .7rem; background: var(--soft); overflow-x: auto;
  font: 13px/1.5 ui-monospace, monospace; }
mark { background: #f4b40066; color: inherit; border-bottom: 2px solid var(--warn); }
svg.plot { width: 100%; min-width: 520px; max-width: 620px; height: auto; display: block; }
.player { display: flex; gap: .6rem; align-items: center; max-width: 745px; margin: .5rem 0; }
.player[hidden] { display: none; }
.player input { flex: 1; min-width: 0; } .player button { min-width: 4.5rem; font: inherit; }
.player output { min-width: 4.5rem; font-variant-numeric: tabular-nums; }
@media (max-width: 600px) {
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .35rem; }
  .shots { gap: .3rem .4rem; } figcaption { font-size: .75rem; }
}
"""

PLAYER = """
for (const player of document.querySelectorAll('.player')) {
  const films = player.closest('section').querySelectorAll('.film');
  const [button, slider, output] = [player.querySelector('button'), player.querySelector('input'),
                                    player.querySelector('output')];
  const count = Number(slider.max), columns = Number(player.dataset.columns), rows = Number(player.dataset.rows);
  let timer = 0;
  const show = () => {
    const frame = Number(slider.value) - 1, x = frame % columns, y = Math.floor(frame / columns);
    for (const film of films) {
      film.style.backgroundPosition =
        `${columns > 1 ? 100 * x / (columns - 1) : 0}% ${rows > 1 ? 100 * y / (rows - 1) : 0}%`;
    }
    output.textContent = `${slider.value} of ${count}`;
  };
  const stop = () => { clearInterval(timer); timer = 0; button.textContent = 'Play'; };
  button.addEventListener('click', () => {
    if (timer) { stop(); return; }
    button.textContent = 'Pause';
    timer = setInterval(() => { slider.value = Number(slider.value) % count + 1; show(); }, 125);
  });
  slider.addEventListener('input', () => { stop(); show(); });
  player.hidden = false;
}
"""
