() => {
    const kinds = {
        legend: ".legend .traces text",
        title: ".infolayer [class*='title'] text",
        tick: ".xtick text, .ytick text",
        mark: ".annotation text.annotation-text",
    }
    const plots = [...document.querySelectorAll(".js-plotly-plot")].filter(p => p.checkVisibility())
    return plots.map((plot) => {
        const { className } = plot.closest('[class*="st-key-figure"]')
        const key = className.match(/st-key-(figure-[\w-]+)/)[1]
        const box = (node) => {
            const { left, right, top, bottom } = node.getBoundingClientRect()
            // A line is half as tall again as its letters.
            const rest = 0.24 * parseFloat(getComputedStyle(node).fontSize)
            return [left, right, top + rest, bottom - rest]
        }
        const words = Object.entries(kinds).flatMap(([kind, selector]) =>
            [...plot.querySelectorAll(selector)]
                .filter(n => n.textContent.trim() && n.checkVisibility({opacityProperty: true,
                                                                        visibilityProperty: true}))
                .map(n => [`${kind} ${n.textContent}`, box(n)]))
        return [key, box(plot), words]
    })
}
