//! Files that pages need, embedded, under names that change with their content: browsers may keep them for ever. Serves nothing.

/// Where all assets are.
pub const ASSETS_PATH: &str = "/assets";

/// One file.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    /// Its name without the hash, such as `style.css`.
    stem: &'static str,
    extension: &'static str,
    hash: u64,
    /// What it is.
    pub content_type: &'static str,
    /// What is in it.
    pub text: &'static str,
}

/// Colours, type and the parts that all pages share.
pub static STYLE: Asset = Asset::new("style", "css", "text/css; charset=utf-8", include_str!("static/style.css"));
/// The sign in a browser's tab.
pub static ICON: Asset = Asset::new("icon", "svg", "image/svg+xml", include_str!("static/icon.svg"));

impl Asset {
    /// A file of this crate.
    pub const fn new(
        stem: &'static str,
        extension: &'static str,
        content_type: &'static str,
        text: &'static str,
    ) -> Self {
        Self { stem, extension, hash: fnv1a(text.as_bytes()), content_type, text }
    }

    /// The name under [`ASSETS_PATH`], such as `style-0f3a….css`.
    pub fn name(&self) -> String {
        format!("{}-{:016x}.{}", self.stem, self.hash, self.extension)
    }

    /// Its address on the same server.
    pub fn href(&self) -> String {
        format!("{ASSETS_PATH}/{}", self.name())
    }
}

/// The asset of this name among those that a server has.
pub fn named<'a>(assets: &[&'a Asset], name: &str) -> Option<&'a Asset> {
    assets.iter().copied().find(|asset| asset.name() == name)
}

/// FNV-1a: names need to differ where contents do, and nobody is kept from forging one.
const fn fnv1a(bytes: &[u8]) -> u64 {
    let (mut hash, mut idx) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while idx < bytes.len() {
        hash = (hash ^ bytes[idx] as u64).wrapping_mul(0x0100_0000_01b3);
        idx += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_changes_with_the_content() {
        let of = |text| Asset::new("style", "css", "text/css", text).name();
        // Of FNV's own test vectors.
        assert_eq!(of("foobar"), "style-85944171f73967e8.css");
        assert_ne!(of("a{}"), of("b{}"));
    }

    #[test]
    fn an_asset_is_found_by_its_name_only() {
        assert!(named(&[&STYLE, &ICON], &ICON.name()).is_some_and(|asset| asset.text == ICON.text));
        assert!(named(&[&STYLE], &ICON.name()).is_none() && named(&[&STYLE], "style.css").is_none());
    }
}
