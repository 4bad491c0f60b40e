// A picture gets a box of its own. On a phone it keeps a width at which its words can be read, and the box scrolls.
document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll(".content img")) {
    const box = document.createElement("div");
    box.className = "picture";
    picture.replaceWith(box);
    box.append(picture);
  }
  // A cell of many words keeps a width on a phone at which it reads as text. The table scrolls.
  for (const cell of document.querySelectorAll(".content td")) {
    const letters = cell.textContent.length;
    if (letters > 12) cell.classList.add(letters > 50 ? "wordy" : "words");
  }
});
