"""The look of the pages, light and dark."""

CSS = """\
:root {
  color-scheme: light dark;
  --ink: #1f2328; --faint: #59636e; --paper: #f6f8fa; --card: #ffffff; --line: #d8dee4;
  --accent: #31688e; --warm: #9a6700;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --card: #161b22; --line: #30363d;
    --accent: #6ece58; --warm: #d29922;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 3rem 1.25rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header { max-width: 46rem; margin-bottom: 2.5rem; }
h1 { margin: 0 0 1rem; font-size: 2.1rem; line-height: 1.2; letter-spacing: -0.02em; text-wrap: balance; }
h2 { margin: 0; font-size: 1.35rem; letter-spacing: -0.01em; }
h2 span { color: var(--accent); }
.eyebrow { margin: 0 0 0.4rem; color: var(--accent); font-size: 0.85rem; font-weight: 600; letter-spacing: 0.04em; }
.note { padding: 0.7rem 1rem; border-left: 3px solid var(--warm); background: var(--card); border-radius: 0 8px 8px 0; }
section {
  margin: 0 0 2rem; padding: 1.5rem 1.75rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 12px;
}
.facts { margin: 0.2rem 0 1.2rem; color: var(--faint); font-size: 0.9rem; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.5rem 0.9rem 0.5rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { color: var(--faint); font-weight: 500; }
td:first-child { font-weight: 600; }
small { color: var(--faint); font-size: 0.85em; }
.advice { margin: 1.2rem 0; padding: 0; list-style: none; }
.advice li { margin: 0.3rem 0; }
.advice b { margin-right: 0.4rem; color: var(--accent); }
figure { margin: 1.75rem 0 0; }
img { display: block; width: 100%; height: auto; margin-bottom: 0.75rem; }
figcaption { max-width: 46rem; color: var(--faint); font-size: 0.9rem; }
details { margin-top: 1.5rem; }
summary { cursor: pointer; color: var(--accent); }
details table { width: auto; }
footer { color: var(--faint); font-size: 0.8rem; text-align: center; }
"""
