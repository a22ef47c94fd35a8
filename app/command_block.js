// A command in a block, with a button that copies it.
const SAID = 2000 // milliseconds in which the button says that it has

async function copy(command, block) {
  if (navigator.clipboard) return navigator.clipboard.writeText(command)
  // Pages from another machine have no clipboard: the words are selected for the keys that copy.
  getSelection().selectAllChildren(block)
  if (!document.execCommand("copy")) throw new Error("not copied")
}

export default function ({ data, parentElement }) {
  const block = parentElement.querySelector("code")
  const button = parentElement.querySelector("button")
  block.textContent = data.command
  button.setAttribute("aria-label", `Copy ${data.command}`)
  button.onclick = async () => {
    const done = await copy(data.command, block).then(() => "Copied", () => "Select and copy")
    button.textContent = done
    setTimeout(() => (button.textContent = "Copy"), SAID)
  }
}
