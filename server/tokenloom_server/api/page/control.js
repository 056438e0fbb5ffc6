// Asks for what changes a run. Where the tab's token is for looking only, a dialog asks for the one for control, which is
// used for this one request and kept nowhere.

import { NoEntry } from "./ask.js";
import { View } from "./view.js";

// `run.ask`, with a token of its own where the server wants another one. Raises what it raises, also where the dialog is
// cancelled.
export async function askControl(run, path, options) {
  for (let token = ""; ;) {
    try {
      return await run.ask(path, { ...options, token });
    } catch (error) {
      if (error.kind !== "Forbidden" && !(token && error instanceof NoEntry)) throw error;
      token = await enter(error.message);
      if (!token) throw error;
    }
  }
}

function enter(message) {
  const dialog = new View("control");
  dialog.text("message", message);
  document.body.append(dialog.root);
  dialog.slot("cancel").addEventListener("click", () => dialog.root.close());
  dialog.root.showModal();
  return new Promise((resolve) => {
    let token = "";
    dialog.slot("form").addEventListener("submit", (event) => {
      event.preventDefault();
      token = dialog.slot("token").value.trim();
      dialog.root.close();
    });
    dialog.root.addEventListener("close", () => {
      dialog.root.remove();
      resolve(token);
    });
  });
}
