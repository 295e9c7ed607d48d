// Requests name the origin: with a user and password in the page's own address, relative ones are refused.
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
