/* The search's worker where the site is read from the disk: browsers start none from file://, so it runs in a hidden
   frame. What may live here: as much of Worker as the search uses. Served over HTTP this does nothing. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      const script = new URL(url, location.href).href.replaceAll('"', "%22")
      // What the worker posts goes to the page; what the page posts, to the worker.
      this.frame.srcdoc =
        "<script>hear = postMessage.bind(window); postMessage = data => parent.postMessage(data, '*')</script>" +
        '<script src="' + script + '"></script>'
      this.ready = new Promise(done => this.frame.addEventListener("load", done, { once: true }))
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return
        const told = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(told)
        if (this.onmessage) this.onmessage(told)
      })
      const add = () => document.body.append(this.frame)
      document.body ? add() : addEventListener("DOMContentLoaded", add)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.hear(data, "*"))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
