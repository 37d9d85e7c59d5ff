// What a screen reader hears of a running answer: whole sentences, never single tokens.

const region = document.getElementById("say");

export function say(text) {
  const line = document.createElement("p");
  line.textContent = text;
  region.append(line);
  while (region.children.length > 20) region.firstChild.remove();
}

export class Reader {
  #held = "";

  push(text) {
    this.#held += text;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((sign) => this.#held.lastIndexOf(sign)));
    if (end < 0) return;
    say(this.#held.slice(0, end + 1));
    this.#held = this.#held.slice(end + 1);
  }

  end() {
    if (this.#held.trim()) say(this.#held);
    this.#held = "";
  }
}
