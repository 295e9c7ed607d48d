"""The HTML page with every stream's state, figures and preview, and the preview images."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from html import escape

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock_video.api.calls import Calls, Refusal
from penstock_video.api.models import Stream
from penstock_video.api.routes import OVER, SourceId, found_in, refuse_pictureless, stream_of
from penstock_video.interfaces import PipelineControl, Previews
from penstock_video.types import SourceState

FIRST_PICTURE_S = 2.0
_TURN_S = 1.0  # how often a viewer of a source without pictures looks whether the source is still there
_BEFORE_ALL = -1
_BOUNDARY = b"\r\n--frame\r\n"
_JPEG: dict[int | str, dict[str, object]] = {200: {"content": {"image/jpeg": {}}}}
_MJPEG: dict[int | str, dict[str, object]] = {200: {"content": {"multipart/x-mixed-replace": {}}}}


class Viewers:
    """How many watch, and how many may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def enter(self) -> None:
        """One more. Raises Refusal (503)."""
        if self.count >= self._limit:
            raise Refusal(503, f"{self.count} viewers watch previews (limit {self._limit}); retry, or take preview.jpg")
        self.count += 1

    def leave(self) -> None:
        """One less."""
        self.count -= 1


class _Moving(StreamingResponse):
    """Pictures, each in the place of the former; who stops reading is cut by its connection."""

    def __init__(self, pictures: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(pictures, media_type="multipart/x-mixed-replace; boundary=frame")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class _Watch:
    """The pictures of sources, for as long as they are there."""

    def __init__(self, control: PipelineControl, previews: Previews, calls: Calls) -> None:
        self._control, self._previews, self._calls = control, previews, calls

    async def check(self, source_id: str) -> None:
        """Raises Refusal: 404, or 409 where no picture comes of it until it is resumed, or added anew."""
        refuse_pictureless(found_in(await self._calls.run(self._control.statistics), source_id))

    async def next(self, source_id: str, after: int, timeout_s: float) -> tuple[int, bytes] | None:
        return await self._calls.run(lambda: self._previews.wait(source_id, after, timeout_s))

    async def parts(self, source_id: str) -> AsyncIterator[bytes]:
        """Of a multipart answer: each picture with the boundary behind it, at which a browser shows it."""
        number, clock = _BEFORE_ALL, asyncio.get_running_loop().time
        yield _BOUNDARY.lstrip()
        while True:
            requested_at = clock()
            try:
                found = await self.next(source_id, number, _TURN_S)
                if found is None and not await self._is_there(source_id):
                    return
            except Refusal:  # the program ends, or the pipeline hangs
                return
            if found is not None:
                number, jpeg = found
                yield b"content-type: image/jpeg\r\ncontent-length: %d\r\n\r\n" % len(jpeg) + jpeg + _BOUNDARY
            else:  # a source that is over has none at once, too
                await asyncio.sleep(requested_at + _TURN_S - clock())

    async def _is_there(self, source_id: str) -> bool:
        return any(each.source_id == source_id for each in await self._calls.run(self._control.statistics))


def previews_router(control: PipelineControl, previews: Previews, calls: Calls, viewers: Viewers) -> APIRouter:
    """preview.jpg and preview.mjpeg of each source. viewers: of the latter. calls: of their own, they wait long."""
    router = APIRouter(prefix="/v1/streams", tags=["previews"])
    watch = _Watch(control, previews, calls)

    @router.get("/{source_id}/preview.jpg", response_class=Response, responses=_JPEG, summary="Its newest picture.")
    async def still(source_id: SourceId) -> Response:
        await watch.check(source_id)
        found = await watch.next(source_id, _BEFORE_ALL, FIRST_PICTURE_S)
        if found is None:
            raise Refusal(503, f"no picture of {source_id!r} came within {FIRST_PICTURE_S:g} s; its state says why")
        return Response(found[1], media_type="image/jpeg")

    @router.get("/{source_id}/preview.mjpeg", response_class=Response, responses=_MJPEG, summary="Picture by picture.")
    async def moving(source_id: SourceId) -> Response:
        await watch.check(source_id)
        viewers.enter()
        return _Moving(watch.parts(source_id), viewers.leave)

    return router


STYLE = """
:root{color-scheme:light dark;--ground:#f4f5f7;--card:#fff;--text:#1b1f24;--faint:#5c6570;--line:#d9dde3;
--good:#17693a;--warn:#8a5300;--bad:#b3261e;--calm:#4b5563;--void:#e6e9ee}
@media(prefers-color-scheme:dark){:root{--ground:#111418;--card:#1a1e24;--text:#e6e9ee;--faint:#9aa4b0;--line:#2d343d;
--good:#6fd39a;--warn:#f0b659;--bad:#ff8f85;--calm:#a7b0bc;--void:#0b0d10}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);font:15px/1.45 system-ui,sans-serif}
header,main{max-width:1500px;margin:0 auto;padding:14px 20px}
header{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:baseline}
h1{font-size:20px;margin:0}
header span,header a,.id,dt,.counts th{color:var(--faint)}
#streams{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:16px}
article{background:var(--card);border:1px solid var(--line);border-radius:8px;overflow:hidden}
.picture{display:block;aspect-ratio:16/9;background:var(--void);color:var(--faint);font-size:13px;text-align:center}
.picture img{width:100%;height:100%;object-fit:contain;display:block}
.picture img.absent{object-fit:none;visibility:hidden}
.picture{position:relative}.picture span{position:absolute;inset:0;display:grid;place-content:center}
.picture img{position:relative;z-index:1}
.body{padding:10px 14px 14px}
h2{font-size:16px;margin:0;display:flex;justify-content:space-between;gap:10px;align-items:baseline}
h2 .name{overflow-wrap:anywhere}
.id{font-size:12.5px;overflow-wrap:anywhere}
.state{font-size:12.5px;font-weight:600;border:1px solid currentColor;border-radius:99px;padding:1px 9px;
white-space:nowrap;color:var(--calm)}
.running{color:var(--good)}.connecting,.reconnecting,.stalled{color:var(--warn)}.auth_failed,.failed{color:var(--bad)}
.reason{color:var(--bad);font-size:13px;min-height:1.45em;margin:3px 0 9px;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:auto 1fr auto 1fr;gap:2px 12px;margin:0;font-variant-numeric:tabular-nums}
dt{font-size:13px}dd{margin:0;text-align:right}
table{border-collapse:collapse;width:100%;margin-top:8px;font-size:13px;font-variant-numeric:tabular-nums}
.counts th{font-weight:400;text-align:left;overflow-wrap:anywhere}
.counts td{text-align:right}.counts td,.counts th{border-top:1px solid var(--line);padding:2px 0}
code{font-size:13px}
.verbs{display:flex;flex-wrap:wrap;gap:6px 8px;align-items:center;margin-top:12px}[hidden]{display:none!important}
.verbs button{font:inherit;font-size:13px;color:inherit;background:none;border:1px solid var(--line);border-radius:6px;
padding:3px 12px;cursor:pointer}
.verbs button:hover,.verbs button:focus-visible{border-color:currentColor}.verbs button:disabled{opacity:.5}
.verbs [data-verb=remove]{margin-left:auto;color:var(--bad)}
.said{flex-basis:100%;color:var(--bad);font-size:13px;overflow-wrap:anywhere}.said:empty{display:none}
"""

# Requests name the origin: where the page's own address has a user and password in it, relative ones are refused.
SCRIPT = """
const ask=(path,how)=>fetch(location.origin+path,how);
const cards=[...document.querySelectorAll('article')],seen=new Set(),byId=new Map(cards.map(c=>[c.dataset.id,c]));
const watch=new IntersectionObserver(es=>es.forEach(e=>e.isIntersecting?seen.add(e.target):seen.delete(e.target)));
cards.forEach(c=>watch.observe(c));
const field=(card,name)=>card.querySelector('[data-f="'+name+'"]');
const put=(card,name,text)=>{const e=field(card,name);if(e.textContent!==text)e.textContent=text};
const still=state=>['paused','ended','failed'].includes(state);
function offer(card,state){
 const verb=name=>card.querySelector('[data-verb='+name+']'),over=state==='ended'||state==='failed';
 verb('pause').hidden=over||state==='paused';verb('resume').hidden=state!=='paused';verb('remove').hidden=false;
 const image=card.querySelector('img');card.dataset.state=state;
 if(still(state))image.classList.add('absent');
 card.querySelector('.picture span').textContent=still(state)?state:'no picture';
}
const shownNames=counts=>{
 const names=Object.keys(counts);
 return names.filter(name=>{
  const rule=names.find(other=>name.startsWith(other+'/'));
  return !rule||counts[rule]!==counts[name]||names.filter(other=>other.startsWith(rule+'/')).length>1});
};
function show(card,s){
 offer(card,s.state);
 const state=card.querySelector('.state');state.textContent=s.state.replace('_',' ')+(s.is_frozen?' (frozen)':'');
 state.className='state '+s.state;
 put(card,'reason',s.reason);put(card,'decoder',s.decoder);
 put(card,'fps',s.fps.toFixed(1));put(card,'frames',String(s.frames));put(card,'inferred',String(s.inferred));
 put(card,'restarts',String(s.restarts));
 put(card,'latency',s.latency_s===null?'–':Math.round(s.latency_s*1000)+' ms');
 const drops=Object.entries(s.drops).filter(d=>d[1]);
 put(card,'drops',String(drops.reduce((sum,d)=>sum+d[1],0)));
 field(card,'drops').title=drops.map(d=>d[0]+' '+d[1]).join(', ');
 const rows=shownNames(s.counts).map(name=>{const r=document.createElement('tr');
  r.append(document.createElement('th'),document.createElement('td'));
  r.children[0].textContent=name;r.children[1].textContent=s.counts[name];return r});
 card.querySelector('.counts').replaceChildren(...rows);
}
async function figures(){
 if(document.hidden)return;
 const answer=await ask('/v1/streams');if(!answer.ok)throw new Error(answer.status);
 const streams=(await answer.json()).streams;
 if(streams.length!==cards.length||streams.some(s=>!byId.has(s.source_id))){location.reload();return}
 streams.forEach(s=>show(byId.get(s.source_id),s));
 document.getElementById('fps').textContent=streams.reduce((sum,s)=>sum+s.fps,0).toFixed(1);
}
async function figuresAgain(){
 const note=document.getElementById('note');
 try{await figures();note.textContent=''}catch(e){note.textContent='no answer; these figures are old'}
 setTimeout(figuresAgain,2000);
}
cards.forEach(card=>{
 const image=card.querySelector('img');let n=0;
 const again=(pause=1000)=>setTimeout(()=>{
  if(document.hidden||!seen.has(card)||still(card.dataset.state)){again();return}
  image.src=image.dataset.src+'?n='+(++n)},pause);
 image.addEventListener('load',()=>{image.classList.toggle('absent',still(card.dataset.state));again()});
 image.addEventListener('error',()=>{image.classList.add('absent');again(5000)});
 if(!image.src)again();else if(image.complete){if(!image.naturalWidth)image.classList.add('absent');again()}
});
async function press(card,button){
 const id=card.dataset.id,verb=button.dataset.verb,said=card.querySelector('.said'),remove=verb==='remove';
 if(remove&&!confirm('Remove '+id+'? It is read no more; what it wrote stays.'))return;
 button.disabled=true;said.textContent='';
 try{
  const way='/v1/streams/'+encodeURIComponent(id);
  const answer=await ask(remove?way:way+'/'+verb,{method:remove?'DELETE':'POST'});
  if(!answer.ok)said.textContent=(await answer.json()).error;
  await figures();
 }catch(e){said.textContent='no answer; try again'}
 button.disabled=false;
}
cards.forEach(card=>{
 offer(card,card.dataset.state);
 card.querySelectorAll('button').forEach(b=>b.addEventListener('click',()=>press(card,b)));
});
setTimeout(figuresAgain,2000);
"""

# Hidden without JavaScript, which they need.
_VERBS = (
    '<div class="verbs"><button type="button" data-verb="pause" hidden>Pause</button>'
    '<button type="button" data-verb="resume" hidden>Resume</button>'
    '<button type="button" data-verb="remove" hidden>Remove</button><span class="said" role="status"></span></div>'
)
STILL = (SourceState.PAUSED, *OVER)  # no picture comes


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    "default-src 'none'; img-src 'self' data:; connect-src 'self'; "
    f"style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_router(control: PipelineControl, calls: Calls) -> APIRouter:
    """GET /"""
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        streams = [stream_of(each) for each in await calls.run(control.statistics)]
        return HTMLResponse(render(streams), headers={"content-security-policy": POLICY})

    return router


def render(streams: Sequence[Stream]) -> str:
    """The page. Whatever a source is called, or says of itself, is text in it."""
    cards = "".join(_card(stream) for stream in streams)
    nothing = "<p>No streams. <code>POST /v1/streams</code> adds one.</p>"
    fps = sum(stream.fps for stream in streams)
    noun = "stream" if len(streams) == 1 else "streams"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>penstock video</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><header><h1>penstock video</h1>'
        f'<span>{len(streams)} {noun}, <b id="fps">{fps:.1f}</b> frames/s</span>'
        '<a href="/metrics">metrics</a><a href="/v1/streams">JSON</a><a href="/openapi.json">API</a>'
        f'<span id="note" role="status"></span></header><main>{nothing if not streams else ""}'
        f'<div id="streams">{cards}</div></main><script>{SCRIPT}</script></body></html>'
    )


def _card(stream: Stream) -> str:
    source_id, name = escape(stream.source_id), escape(stream.camera_name or stream.source_id)
    way = f"/v1/streams/{source_id}"
    state = stream.state.value.replace("_", " ") + (" (frozen)" if stream.is_frozen else "")
    is_still = stream.state in STILL
    shown, source = (state, "") if is_still else ("no picture", f'src="{way}/preview.jpg"')
    size = f"{stream.width}×{stream.height} {stream.codec}" if stream.width else ""
    return (
        f'<article data-id="{source_id}" data-state="{stream.state.value}">'
        f'<a class="picture" href="{way}/preview.mjpeg"><span>{escape(shown)}</span>'
        f'<img {source} data-src="{way}/preview.jpg" alt="" loading="lazy"></a>'
        f'<div class="body"><h2><span class="name">{name}</span>'
        f'<span class="state {stream.state.value}">{escape(state)}</span></h2>'
        f'<div class="id" title="{escape(stream.uri)}">{source_id} {escape(size)}'
        f' <span data-f="decoder">{escape(stream.decoder)}</span></div>'
        f'<div class="reason" data-f="reason">{escape(stream.reason)}</div><dl>{_figures(stream)}</dl>'
        f'<table><tbody class="counts">{_counts(stream.counts)}</tbody></table>{_VERBS}</div></article>'
    )


def _figures(stream: Stream) -> str:
    dropped = ", ".join(f"{reason} {n}" for reason, n in stream.drops.items() if n)
    latency = "–" if stream.latency_s is None else f"{stream.latency_s * 1000:.0f} ms"
    rows = (
        ("frames/s", "fps", f"{stream.fps:.1f}", ""),
        ("latency", "latency", latency, ""),
        ("decoded", "frames", str(stream.frames), ""),
        ("inferred", "inferred", str(stream.inferred), ""),
        ("dropped", "drops", str(sum(stream.drops.values())), dropped),
        ("restarts", "restarts", str(stream.restarts), ""),
    )
    return "".join(
        f'<dt>{label}</dt><dd data-f="{name}" title="{escape(title)}">{text}</dd>' for label, name, text, title in rows
    )


def _counts(counts: Mapping[str, int]) -> str:
    return "".join(f"<tr><th>{escape(name)}</th><td>{counts[name]}</td></tr>" for name in shown_counts(counts))


def shown_counts(counts: Mapping[str, int]) -> list[str]:
    """The names that are shown: not of a rule's only class, whose count is the rule's. The script has the same."""

    def is_shown(name: str) -> bool:
        rule = next((other for other in counts if name.startswith(f"{other}/")), None)
        if rule is None or counts[rule] != counts[name]:
            return True
        return sum(other.startswith(f"{rule}/") for other in counts) > 1

    return [name for name in counts if is_shown(name)]
