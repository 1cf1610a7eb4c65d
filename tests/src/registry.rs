//! A registry on loopback: the CNCF's distribution, ORAS' client beside it (`clients/registry.py`), and [`Middle`] before it.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Stdio},
    thread::spawn,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use stoker_cluster::Keeper;

use crate::{cluster::of_go, middle::Middle, talk::Talk};

/// What its client needs.
const REQUIREMENTS: &str = include_str!("../clients/registry-requirements.txt");
/// Whom tokens are for.
const SERVICE: &str = "registry.tests";
/// User and password where it asks for such.
pub const LOGIN: [&str; 2] = ["tests", "secret"];
/// The same as `htpasswd -B` writes it.
const PASSWORD_FILE: &str = "tests:$2b$04$bD2ZW262/rjAv36whWJc3.C9WAPhbQUIXmk2fooWDIRUiiZS/dGVK\n";

/// See the module. It stops when it is dropped.
pub struct Registry {
    talk: Talk,
    home: tempfile::TempDir,
    open: Server,
    middle: Middle,
    keeper: Keeper,
}

/// A process of the registry's.
struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same images, given to who says who it is.
pub struct Guarded {
    server: Server,
}

impl Guarded {
    /// Host and port.
    pub fn address(&self) -> &str {
        &self.server.address
    }
}

/// A layer as it is pushed.
pub struct Layer<'a> {
    /// Its bytes.
    pub content: &'a [u8],
    /// What it says it is.
    pub media_type: &'a str,
    /// What else it says.
    pub annotations: &'a [(&'a str, &'a str)],
}

impl Registry {
    /// An empty one that asks nobody who it is. An error is a reason to skip.
    pub fn start() -> Result<Self> {
        let (talk, _) = Talk::start("registry.py", REQUIREMENTS)?;
        let (home, keeper) = (tempfile::tempdir()?, Keeper::start()?);
        let open = serve(&keeper, home.path(), "open", &json!({}))?;
        let middle = Middle::start(open.address.parse()?)?;
        Ok(Self { talk, home, open, middle, keeper })
    }

    /// What sits before it.
    pub fn middle(&self) -> &Middle {
        &self.middle
    }

    /// Host and port, of what sits before it.
    pub fn address(&self) -> String {
        self.middle.address().to_string()
    }

    /// Pushes files of a directory, and folders of it, as ORAS does.
    pub fn push(&self, image: &str, directory: &Path, names: &[&str]) -> Result<()> {
        let target = self.target(image);
        self.talk.order(&json!({"do": "push", "target": target, "directory": directory, "names": names})).map(drop)
    }

    /// Pushes layers of any kind.
    pub fn push_layers(&self, image: &str, layers: &[Layer<'_>]) -> Result<()> {
        let said = |(number, layer): (usize, &Layer<'_>)| {
            let path = self.home.path().join(format!("layer-{number}"));
            fs::write(&path, layer.content)?;
            let annotations: serde_json::Map<String, Value> =
                layer.annotations.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
            Ok(json!({"path": path, "media_type": layer.media_type, "annotations": annotations}))
        };
        let layers = layers.iter().enumerate().map(said).collect::<Result<Vec<_>>>()?;
        self.talk.order(&json!({"do": "push_layers", "target": self.target(image), "layers": layers})).map(drop)
    }

    /// Pulls an image with ORAS' client.
    pub fn pull(&self, image: &str, directory: &Path) -> Result<()> {
        self.talk.order(&json!({"do": "pull", "target": self.target(image), "directory": directory})).map(drop)
    }

    /// Its images behind user and password.
    pub fn with_password(&self) -> Result<Guarded> {
        let path = self.home.path().join("htpasswd");
        fs::write(&path, PASSWORD_FILE)?;
        let auth = json!({"auth": {"htpasswd": {"realm": "tests", "path": path}}});
        Ok(Guarded { server: serve(&self.keeper, self.home.path(), "password", &auth)? })
    }

    /// Its images behind a server that hands out tokens, for user and password or, of images below `public/`, to everybody.
    pub fn with_tokens(&self) -> Result<Guarded> {
        let tokens = json!({"do": "tokens", "user": LOGIN[0], "password": LOGIN[1], "service": SERVICE});
        let tokens = self.talk.order(&tokens)?;
        let path = self.home.path().join("keys.json");
        fs::write(&path, tokens["keys"].to_string())?;
        let auth = json!({"auth": {"token": {
            "realm": tokens["realm"], "service": SERVICE, "issuer": "tests", "jwks": path, "signingalgorithms": ["ES256"],
        }}});
        Ok(Guarded { server: serve(&self.keeper, self.home.path(), "tokens", &auth)? })
    }

    fn target(&self, image: &str) -> String {
        format!("{}/{image}", self.open.address)
    }
}

/// Starts a registry over the images of `home`.
fn serve(keeper: &Keeper, home: &Path, name: &str, more: &Value) -> Result<Server> {
    let mut settings = json!({
        "version": "0.1",
        "log": {"level": "info", "accesslog": {"disabled": true}},
        "storage": {"filesystem": {"rootdirectory": home.join("images")}},
        "http": {"addr": "127.0.0.1:0", "secret": "tests"},
    });
    let more = more.as_object().context("settings have names")?;
    more.iter().for_each(|(name, value)| settings[name] = value.clone());
    let path = home.join(format!("{name}.yml"));
    fs::write(&path, serde_norway::to_string(&settings)?)?;
    let mut command = keeper.command(&of_go("registry")?)?;
    let mut child = command.arg("serve").arg(&path).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stderr.take().context("a pipe")?).lines();
    let listens = |line: String| line.split_once("listening on ")?.1.split('"').next().map(str::to_owned);
    let found = lines.by_ref().map_while(Result::ok).find_map(listens);
    let address = found.context("the registry does not listen")?;
    // Nobody reads the rest, and it must not wait for that.
    spawn(move || lines.for_each(drop));
    Ok(Server { child, address })
}
