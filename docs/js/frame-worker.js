// Search runs in a worker, which browsers refuse to pages that are opened from disk. There an invisible frame takes its place.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source !== this.inside) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    });
    const setUp = `
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
        const script = document.createElement("script");
        script.src = url;
        script.onload = done;
        document.body.append(script);
      })), Promise.resolve());`;
    const page = this.inside.document;
    page.open();
    page.write(`<body><script>${setUp}</script><script src="${url}"></script></body>`);
    page.close();
    this.ready = new Promise((done) => { this.inside.onload = done; });
  }

  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
  }
}
if (location.protocol === "file:") window.Worker = FrameWorker;
