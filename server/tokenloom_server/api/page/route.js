// Addresses within the page: `#/` is the list of runs, `#/run/NAME/TAB?key=value` a tab of a run. They are links like any
// other: back, reload, bookmarks and sharing work.

const query = (params) => {
  const text = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== "")).toString();
  return text && `?${text}`;
};

export const href = (run, tab, params = {}) => `#/run/${encodeURIComponent(run)}/${tab}${query(params)}`;

// {run, tab, params} of the page's address; run is null for the list.
export function currentRoute() {
  const [path, text = ""] = location.hash.split(/\?(.*)/s);
  const [, kind, name, tab = ""] = path.split("/");
  const params = Object.fromEntries(new URLSearchParams(text));
  if (kind !== "run" || !name) return { run: null, tab: "", params };
  try {
    return { run: decodeURIComponent(name), tab, params };
  } catch {
    return { run: name, tab, params };
  }
}

// Keeps what is looked at in the address, without a step in the browser's history for each change.
export const replaceRoute = (run, tab, params) => history.replaceState(null, "", href(run, tab, params));
