// Runs Plotly while the server reads the run: once its part of the work has begun, and not before, as
// the page has one thread for both.
const begun = () => document.querySelector('[data-testid="stApp"][data-test-script-state="running"]')
const seen = new MutationObserver(() => {
  if (!begun()) return
  seen.disconnect()
  import("PLACE").catch(() => {}) // a figure that needs it asks again, and says what went wrong
})
seen.observe(document.body, { childList: true, subtree: true, attributeFilter: ["data-test-script-state"] })
