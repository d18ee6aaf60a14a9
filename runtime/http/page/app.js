// Start of the page: chat, live view, and the key that both send.

import { useKey } from "./api.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { refresh, startLive } from "./live.js";

byId("key").addEventListener("input", (event) => useKey(event.target.value));
byId("key").addEventListener("change", refresh);
byId("key").addEventListener("keydown", (event) => event.key === "Enter" && refresh());
startChat();
startLive();
