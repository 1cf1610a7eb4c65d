//! What a page looks like, in both themes, wide and as narrow as a page has to work: is anybody kept out, is anything cut off, and
//! where `$STOKER_PICTURES` says so pictures for the docs. Knows no page.

use std::{env, fs, path::PathBuf};

use anyhow::{Result, ensure};

use crate::browser::{Browser, Theme};

const WIDTHS: [u32; 2] = [1280, 320];
/// Of one picture: all of them lie beside the docs.
const PICTURE_BYTES: usize = 200_000;

/// Where pictures go, if they are wanted.
pub fn pictures() -> Option<PathBuf> {
    env::var_os("STOKER_PICTURES").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// Nothing keeps people out in either theme, and nothing is wider than a window.
pub async fn looks_well(browser: &Browser, test: &str) -> Result<()> {
    for theme in Theme::ALL {
        for width in WIDTHS {
            browser.look(theme, width).await?;
            let found = browser.axe(test).await?;
            ensure!(found.is_empty(), "{}, {width}: {}", theme.name(), found.join("\n"));
            let wide = "[...document.querySelectorAll('main *, header *')].filter(one => one.getBoundingClientRect().right > innerWidth + 1 \
                        && !one.parentElement.closest('.scroll, pre')).map(one => one.outerHTML.slice(0, 120)).slice(0, 5).join('\\n')";
            let overflow = browser.overflow().await?;
            ensure!(overflow <= 0, "it is {overflow} wider than {width}: {}", browser.value(wide).await?);
        }
    }
    browser.look(Theme::Light, 1280).await
}

/// A picture in each theme and width, where they are wanted.
pub async fn draw(browser: &Browser, name: &str) -> Result<()> {
    if pictures().is_none() {
        return Ok(());
    }
    for theme in Theme::ALL {
        for width in WIDTHS {
            keep(browser, &format!("{name}-{}-{width}", theme.name()), theme, width).await?;
        }
    }
    browser.look(Theme::Light, 1280).await
}

/// One picture, light and wide, where they are wanted.
pub async fn draw_one(browser: &Browser, name: &str) -> Result<()> {
    keep(browser, name, Theme::Light, 1280).await
}

async fn keep(browser: &Browser, name: &str, theme: Theme, width: u32) -> Result<()> {
    let Some(folder) = pictures() else { return Ok(()) };
    let png = browser.screenshot(theme, width).await?;
    ensure!(png.len() < PICTURE_BYTES, "{name}: {} bytes", png.len());
    fs::create_dir_all(&folder)?;
    Ok(fs::write(folder.join(format!("{name}.png")), png)?)
}
