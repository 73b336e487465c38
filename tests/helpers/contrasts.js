// The texts of a page that have too little contrast with what is behind them.
() => {
    const rgb = (text) => text.match(/[\d.]+/g).map(Number);
    const light = (color) => color.slice(0, 3).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const after = (node) => {
        for (; node; node = node.parentElement) {
            const color = rgb(getComputedStyle(node).backgroundColor);
            if (color.length === 3 || color[3] === 1) return color;
        }
    };
    const low = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!node.checkVisibility() || node.disabled || !(own || node.placeholder)) continue;
        const color = getComputedStyle(node, own ? null : "::placeholder").color;
        const [a, b] = [rgb(color), after(node)].map(light).sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${node.tagName} ${node.className} ${color}`);
    }
    return low;
}
