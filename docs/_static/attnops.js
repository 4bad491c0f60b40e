// A picture gets a box of its own. On a phone it keeps a width at which its words can be read, and the box scrolls.
document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll(".content img")) {
    const box = document.createElement("div");
    box.className = "picture";
    picture.replaceWith(box);
    box.append(picture);
  }
});
