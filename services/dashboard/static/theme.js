// Sets the theme before the first paint; auto follows the system.
(() => {
  const themes = ["auto", "light", "dark"];
  const read = () => {
    try {
      return localStorage.getItem("paceline-theme") || "auto";
    } catch {
      return "auto"; // storage may be forbidden
    }
  };
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  let current = themes.includes(read()) ? read() : "auto";
  apply(current);
  const announce = () => document.dispatchEvent(new Event("themechange"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => (button.textContent = `Theme: ${current}`);
    label();
    button.addEventListener("click", () => {
      current = themes[(themes.indexOf(current) + 1) % themes.length];
      try {
        localStorage.setItem("paceline-theme", current);
      } catch {
        // kept for this page only
      }
      apply(current);
      label();
      announce();
    });
  });
})();
