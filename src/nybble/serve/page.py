"""The chat page at `/`: one file, nothing loaded from elsewhere, a plain client of /v1/chat/completions.

Its one idea: text from the model is only ever set as text, never as HTML.
"""

PAGE = r"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Nybble</title>
<style>
:root { color-scheme: light dark; --back: light-dark(#faf9f7, #16171a); --card: light-dark(#fff, #1f2125);
  --text: light-dark(#1d1d1f, #e8e6e3); --faint: light-dark(#7a766f, #8f8b85); --line: light-dark(#e6e2db, #303338);
  --accent: light-dark(#b4532a, #f0a27a); --mine: light-dark(#f3e9e2, #33291f) }
* { box-sizing: border-box }
body { margin: 0; height: 100dvh; display: flex; flex-direction: column; background: var(--back); color: var(--text);
  font: 16px/1.6 system-ui, sans-serif }
header, main, form { width: 100%; max-width: 48rem; margin: 0 auto; padding: 0 1rem }
header { display: flex; align-items: baseline; gap: .75rem; padding-top: 1rem; padding-bottom: .75rem;
  border-bottom: 1px solid var(--line) }
h1 { margin: 0; font-size: 1.1rem; letter-spacing: .02em } h1 i { color: var(--accent); font-style: normal }
small, .note { color: var(--faint); font-size: .82rem }
header small { flex: 1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
main { flex: 1; overflow-y: auto; padding-top: 1rem }
.turn { margin: 0 0 1rem; white-space: pre-wrap; overflow-wrap: anywhere }
.user { margin-left: auto; width: fit-content; max-width: 85%; padding: .5rem .9rem; border-radius: 1rem 1rem .2rem 1rem;
  background: var(--mine) }
.busy::after { content: "▍"; color: var(--accent); animation: blink 1s steps(2) infinite }
@keyframes blink { 50% { opacity: 0 } }
.error { color: light-dark(#b3261e, #ff8a80) } .note { margin: -.7rem 0 1.2rem }
form { display: flex; gap: .5rem; padding-top: .5rem; padding-bottom: 1rem; align-items: end }
textarea { flex: 1; resize: none; max-height: 12rem; field-sizing: content; padding: .7rem .9rem; border-radius: .9rem;
  border: 1px solid var(--line); background: var(--card); color: inherit; font: inherit }
textarea:focus-visible, button:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px }
button { border: 0; border-radius: .9rem; padding: .75rem 1.1rem; background: var(--accent); color: var(--back);
  font: inherit; font-weight: 600; cursor: pointer }
button.plain { white-space: nowrap; background: none;
  color: var(--faint); padding: 0; font-weight: 400; font-size: .82rem }
details { font-size: .82rem; color: var(--faint); position: relative } summary { cursor: pointer }
details div { position: absolute; right: 0; z-index: 1; padding: .8rem; display: grid; gap: .5rem; width: 15rem;
  background: var(--card); border: 1px solid var(--line); border-radius: .7rem }
label { display: flex; justify-content: space-between; gap: .5rem }
label input { width: 8rem; font: inherit; color: var(--text);
  background: var(--back); border: 1px solid var(--line); border-radius: .4rem; padding: .15rem .4rem }
</style>
<header><h1>nybb<i>le</i></h1><small id="model">…</small>
  <details><summary>Settings</summary><div>
    <label>Temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.7"></label>
    <label>Max tokens <input id="limit" type="number" min="1" placeholder="context"></label>
    <label>API key <input id="key" type="password" autocomplete="off"></label></div></details>
  <button class="plain" id="clear" type="button">New chat</button></header>
<main id="log" aria-live="polite"></main>
<form id="form"><textarea id="text" rows="1" placeholder="Ask something" aria-label="Message" autofocus></textarea>
  <button id="send">Send</button></form>
<script>
const $ = id => document.getElementById(id), log = $("log");
let turns = [], model = null, running = null;
const headers = () => { const key = $("key").value;
  return {"Content-Type": "application/json", ...(key && {Authorization: "Bearer " + key})} };
const low = () => log.scrollHeight - log.scrollTop - log.clientHeight < 120;
const follow = always => { if (always || low()) log.scrollTop = log.scrollHeight };
const add = (kind, text) => { const e = document.createElement("div"); e.className = kind; e.textContent = text;
  log.append(e); follow(); return e };
const told = async r => { throw Error((await r.json().catch(() => null))?.error?.message ?? r.status + " " + r.statusText) };
async function hello() {
  const r = await fetch("v1/models", {headers: headers()}); if (!r.ok) await told(r);
  const m = (await r.json()).data[0]; model = m.id;
  $("model").textContent = `${m.id} · ${m.scheme} · KV ${m.kv_cache} · context ${m.max_model_len}`;
}
$("key").onchange = () => hello().catch(e => $("model").textContent = e.message);
hello().catch(e => $("model").textContent = e.message);
async function ask(text) {
  const sent = [...turns, {role: "user", content: text}], out = (add("turn user", text), add("turn busy", ""));
  follow(true);
  const before = turns, me = running = new AbortController(); $("send").textContent = "Stop";
  const start = performance.now(); let got = "", tokens = 0, cached = 0, first = 0, ended = "";
  try {
    if (!model) await hello();
    const body = {model, messages: sent, stream: true, stream_options: {include_usage: true},
      temperature: Number($("temperature").value), ...($("limit").value && {max_tokens: Number($("limit").value)})};
    const r = await fetch("v1/chat/completions", {method: "POST", headers: headers(), body: JSON.stringify(body),
      signal: me.signal});
    if (!r.ok) await told(r);
    const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done;) {
      const events = (rest + part.value).split("\n\n"); rest = events.pop();
      for (const event of events) {
        const data = event.slice(6); if (data === "[DONE]") continue;
        const chunk = JSON.parse(data); if (chunk.error) throw Error(chunk.error.message);
        if (chunk.usage) { tokens = chunk.usage.completion_tokens; cached = chunk.usage.prompt_tokens_details.cached_tokens }
        const choice = chunk.choices[0]; if (!choice) continue;
        if (choice.finish_reason === "length") ended = " · cut at the token limit";
        if (choice.delta.content) { first ||= performance.now(); got += choice.delta.content; out.textContent = got;
          follow() }
      }
    }
    const now = performance.now();
    add("note", `${tokens} tokens` + (tokens > 1 ? ` · ${((tokens - 1) / (now - first) * 1000).toFixed(1)} per second` : "") +
      ` · first after ${((first || now) - start).toFixed(0)} ms` + (cached ? ` · ${cached} prompt tokens cached` : "") + ended);
  } catch (e) {
    const stopped = e.name === "AbortError";
    if (turns === before) add(stopped ? "note" : "turn error", stopped ? "stopped" : e.message);
  }
  out.classList.remove("busy"); if (running === me) { running = null; $("send").textContent = "Send" }
  if (got && turns === before) turns = [...sent, {role: "assistant", content: got}];
}
$("form").onsubmit = e => { e.preventDefault(); if (running) return running.abort();
  const text = $("text").value.trim();
  if (text) { $("text").value = ""; ask(text) } };
$("text").onkeydown = e => { if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
  e.preventDefault(); if (!running) $("form").requestSubmit() };
$("clear").onclick = () => { running?.abort(); running = null; turns = [];
  $("send").textContent = "Send"; log.textContent = ""; $("text").focus() };
</script></html>
"""
