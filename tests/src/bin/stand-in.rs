//! A container's program for tests of the cluster tools themselves: a web server whose every answer a test can steer.
//! It serves no model and knows no Kubernetes.
//!
//! ```text
//! GET /healthz      200, or 500 after /sicken
//! GET /readyz       200, or 503 after /unready, until /ready
//! GET /hold/N       one line a second for N seconds
//! GET /crash/CODE   prints "crashing with CODE" and exits with it
//! GET /file/PATH    a file, as this process sees it
//! GET /env/NAME     an environment variable
//! GET /args         its arguments
//! GET /whoami       its process id
//! ```
//! Listens on `$STOKER_HOST:$PORT` (8000). SIGTERM ends it at once.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

static SICK: AtomicBool = AtomicBool::new(false);
static UNREADY: AtomicBool = AtomicBool::new(false);

fn main() -> anyhow::Result<()> {
    if let Some(code) = env::args().skip_while(|arg| arg != "--crash").nth(1) {
        crash(code.parse()?);
    }
    let host = env::var("STOKER_HOST").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let port = env::var("PORT").unwrap_or_else(|_| "8000".to_owned());
    let listener = TcpListener::bind(format!("{host}:{port}"))?;
    println!("listening on {host}:{port}");
    for client in listener.incoming() {
        let client = client?;
        thread::spawn(move || answer(client));
    }
    Ok(())
}

fn answer(mut client: TcpStream) -> anyhow::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let path = request.split(' ').nth(1).unwrap_or_default();
    if let Some(seconds) = path.strip_prefix("/hold/") {
        return hold(client, seconds.parse()?);
    }
    let (status, body) = reply(path);
    write!(client, "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())?;
    Ok(())
}

fn reply(path: &str) -> (u16, String) {
    let ok = |body: String| (200, body);
    match path.split('/').collect::<Vec<_>>()[..] {
        ["", "healthz"] => (if SICK.load(Ordering::Relaxed) { 500 } else { 200 }, String::new()),
        ["", "readyz"] => (if UNREADY.load(Ordering::Relaxed) { 503 } else { 200 }, String::new()),
        ["", "sicken"] => ok(switch(&SICK, true)),
        ["", "unready"] => ok(switch(&UNREADY, true)),
        ["", "ready"] => ok(switch(&UNREADY, false)),
        ["", "crash", code] => crash(code.parse().unwrap_or(1)),
        ["", "env", name] => ok(env::var(name).unwrap_or_default()),
        ["", "args"] => ok(env::args().skip(1).collect::<Vec<_>>().join(" ")),
        ["", "whoami"] => ok(std::process::id().to_string()),
        ["", "file", ..] => {
            std::fs::read_to_string(&path["/file".len()..]).map_or_else(|error| (404, error.to_string()), ok)
        }
        _ => (404, String::new()),
    }
}

fn switch(flag: &AtomicBool, to: bool) -> String {
    flag.store(to, Ordering::Relaxed);
    "done".to_owned()
}

fn crash(code: i32) -> ! {
    println!("crashing with {code}");
    std::process::exit(code)
}

fn hold(mut client: TcpStream, seconds: u32) -> anyhow::Result<()> {
    write!(client, "HTTP/1.1 200 x\r\nConnection: close\r\n\r\n")?;
    for second in 0..seconds {
        thread::sleep(Duration::from_secs(1));
        writeln!(client, "{second}")?;
    }
    Ok(())
}
