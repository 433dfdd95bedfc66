/* A page opened from a disk may start no worker, and the search is one: there it runs in a hidden frame.
   The theme would load this from another site, under the same name. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // What the worker posts comes out here; in a frame it would go to the frame itself.
      this.inside.postMessage = (data) =>
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      this.ready = new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
