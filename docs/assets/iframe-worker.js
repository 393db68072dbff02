// The search of a site that is opened as a file. Browsers give such a page no workers, so the search's script runs in a
// frame, which gets and sends the messages of a worker. The theme's plugin `offline` knows this file by its name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      frame.contentDocument.open().close();  // or Firefox replaces the document, and what is in it, later
      const load = (url) => new Promise((loaded, failed) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = loaded;
        script.onerror = failed;
        frame.contentDocument.head.append(script);
      });
      this.inside.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
