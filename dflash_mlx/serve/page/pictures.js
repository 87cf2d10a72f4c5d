"use strict";
// Pictures that go with the next question: chosen, pasted or dropped. They travel as data: URLs.

let pictures = [];

function showPictures() {
  $("attach").hidden = !models[$("model").value]?.capabilities?.image_input.supported;
  $("pictures").replaceChildren(...pictures.map((url, i) => {
    const node = make("button", "");
    Object.assign(node, { type: "button", title: "Remove this picture" });
    node.ariaLabel = `Remove picture ${i + 1}`;
    node.append(Object.assign(new Image(), { src: url, alt: `Picture ${i + 1}` }));
    node.onclick = () => (pictures.splice(i, 1), showPictures(), $("words").focus());
    return node;
  }));
}

async function addPictures(list) { // whether there were any
  const files = [...list].filter((each) => each.type.startsWith("image/"));
  if (files.length && $("attach").hidden) tell("This model reads text alone.", "error");
  else for (const file of files) {
    const reader = new FileReader();
    const read = new Promise((resolve) => (reader.onloadend = resolve));
    reader.readAsDataURL(file);
    await read;
    if (reader.result) pictures.push(reader.result);
  }
  showPictures();
}

function contentOf(text, node) { // of a message; its pictures are shown in `node`
  const urls = pictures.splice(0);
  showPictures();
  for (const url of urls) node.append(Object.assign(new Image(), { src: url, alt: "Picture" }));
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return urls.length ? [...parts, { type: "text", text }] : text;
}

function textOf(content) {
  return Array.isArray(content) ? content.at(-1).text : content;
}

function giveBack(content) { // a question that was not answered
  if (Array.isArray(content)) pictures.unshift(...content.slice(0, -1).map((e) => e.image_url.url));
  showPictures();
}

$("attach").onclick = () => $("files").click();
$("files").onchange = () => addPictures($("files").files).then(() => ($("files").value = ""));
$("words").onpaste = (event) => {
  if (event.clipboardData.files.length) event.preventDefault();
  addPictures(event.clipboardData.files);
};
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => (event.preventDefault(), addPictures(event.dataTransfer.files));
$("model").onchange = showPictures;
new MutationObserver(showPictures).observe($("model"), { childList: true }); // models are known
