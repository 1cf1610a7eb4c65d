//! A model comes from replicas that have it and from its source, on loopback, with faults in the middle of files.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    ops::Range,
    sync::{Arc, LazyLock, Mutex},
    thread::{sleep, spawn},
    time::{Duration, Instant},
};

use stoker_fetch::{
    Access, Fetched, Giver, Order, Progress, Suppliers, digest::sha256_hex, fetch, ledger::CHUNK_BYTES,
    progress::Snapshot,
};

const WEIGHTS: &str = "model.safetensors";
/// Two chunks.
const WEIGHTS_BYTES: usize = CHUNK_BYTES as usize + (3 << 20);
/// Written at once: a fault can be put between two.
const PIECE_BYTES: usize = 64 << 10;

/// What is wrong with a server.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    /// It breaks every answer off after so many bytes.
    Cut(usize),
    /// The byte at this place of every file is another one.
    Wrong(usize),
    /// Between two pieces.
    Slow(Duration),
    /// It has not the weights.
    Lacks,
    /// It gives all, whatever was asked for.
    NoRange,
    /// It answers with this.
    Says(u16),
}

/// One request for a part of the weights.
#[derive(Clone, Debug)]
struct Sent {
    range: Range<usize>,
    bytes: usize,
}

/// Files by name: of a folder with `SHA256SUMS`, or by their content as replicas give them.
struct Server {
    address: String,
    sent: Arc<Mutex<Vec<Sent>>>,
    /// What was shown with each request.
    tickets: Arc<Mutex<Vec<Option<String>>>>,
}

/// The model's files, the same for all: weights look random, so that a byte in a wrong place is a wrong byte.
static MODEL: LazyLock<BTreeMap<String, Vec<u8>>> = LazyLock::new(|| {
    let mut state = 1_u64;
    let mut weights = vec![0; WEIGHTS_BYTES];
    for word in weights.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    [("config.json", b"{}".to_vec()), ("tokenizer.json", b"{\"a\": 1}".to_vec()), (WEIGHTS, weights)]
        .map(|(name, content)| (name.to_owned(), content))
        .into()
});

impl Server {
    fn source(fault: Fault) -> Self {
        let mut files = MODEL.clone();
        let sums: String = files.iter().map(|(name, content)| format!("{}  {name}\n", sha256_hex(content))).collect();
        files.insert("SHA256SUMS".to_owned(), sums.into_bytes());
        Self::of(files, fault)
    }

    fn replica(fault: Fault) -> Self {
        Self::of(
            MODEL.clone().into_values().map(|content| (format!("sha256-{}", sha256_hex(&content)), content)).collect(),
            fault,
        )
    }

    fn of(files: BTreeMap<String, Vec<u8>>, fault: Fault) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sent, tickets): (Arc<Mutex<Vec<Sent>>>, Arc<Mutex<Vec<_>>>) = Default::default();
        let server = Self { address, sent: sent.clone(), tickets: tickets.clone() };
        let files = Arc::new(files);
        spawn(move || {
            for connection in listener.incoming() {
                let (files, sent, tickets) = (files.clone(), sent.clone(), tickets.clone());
                // A client that goes away ends its connection, nothing else.
                let Ok(connection) = connection else { continue };
                spawn(move || _ = answer(connection, &files, fault, &sent, &tickets));
            }
        });
        server
    }

    fn giver(&self, name: &str) -> Giver {
        let headers = [("stoker-ticket", format!("for {name}"))].into();
        Giver { name: name.to_owned(), url: format!("http://{}/", self.address), headers }
    }

    /// Bytes of the weights that it sent, without looks at their size.
    fn weights_sent(&self) -> usize {
        let sent = self.sent.lock().unwrap();
        sent.iter().filter(|sent| sent.range.len() > 1).map(|sent| sent.bytes).sum()
    }

    fn ranges(&self) -> Vec<Range<usize>> {
        self.sent.lock().unwrap().iter().map(|sent| sent.range.clone()).filter(|range| range.len() > 1).collect()
    }
}

fn answer(
    mut connection: TcpStream,
    files: &BTreeMap<String, Vec<u8>>,
    fault: Fault,
    sent: &Mutex<Vec<Sent>>,
    tickets: &Mutex<Vec<Option<String>>>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split_whitespace().nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
    let (mut range, mut ticket) = (None, None);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                range = value.strip_prefix("bytes=").and_then(|range| {
                    range.split_once('-').map(|(a, b)| (a.parse().unwrap(), b.parse::<usize>().unwrap() + 1))
                })
            }
            "stoker-ticket" => ticket = Some(value.to_owned()),
            _ => {}
        }
    }
    tickets.lock().unwrap().push(ticket);
    let status = |connection: &mut TcpStream, code: u16| {
        write!(connection, "HTTP/1.1 {code} No\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
    };
    let Some(content) = files.get(&path) else { return status(&mut connection, 404) };
    let is_weights = content.len() == WEIGHTS_BYTES;
    match fault {
        Fault::Lacks if is_weights => return status(&mut connection, 404),
        Fault::Says(code) => return status(&mut connection, code),
        _ => {}
    }
    let all = 0..content.len();
    let asked: Range<usize> = range.map_or(all.clone(), |(start, end): (usize, usize)| start..end.min(all.end));
    let given = if fault == Fault::NoRange { all.clone() } else { asked };
    let head = if range.is_some() && fault != Fault::NoRange {
        format!("206 Partial Content\r\ncontent-range: bytes {}-{}/{}", given.start, given.end - 1, all.end)
    } else {
        "200 OK".to_owned()
    };
    write!(
        connection,
        "HTTP/1.1 {head}\r\netag: \"1\"\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        given.len()
    )?;
    let place = {
        let mut sent = sent.lock().unwrap();
        sent.push(Sent { range: if is_weights { given.clone() } else { 0..0 }, bytes: 0 });
        sent.len() - 1
    };
    let mut body = content[given.clone()].to_vec();
    match fault {
        Fault::Wrong(at) if given.contains(&at) => body[at - given.start] ^= 1,
        Fault::Cut(bytes) => body.truncate(bytes),
        _ => {}
    }
    for piece in body.chunks(PIECE_BYTES) {
        // Counted before, since whoever has the last one may look at the count at once.
        sent.lock().unwrap()[place].bytes += piece.len();
        connection.write_all(piece)?;
        if let Fault::Slow(pause) = fault {
            sleep(pause);
        }
    }
    Ok(())
}

/// What came of a fetch.
struct Came {
    fetched: Fetched,
    progress: Snapshot,
    notices: String,
    _cache: tempfile::TempDir,
}

fn told(givers: Vec<Giver>) -> Arc<Suppliers> {
    let suppliers = Suppliers::awaiting(Instant::now(), None).unwrap();
    suppliers.tell(givers, Instant::now());
    Arc::new(suppliers)
}

/// Fetches from the source and from replicas that are told of.
fn fetched(source: &Server, givers: Vec<Giver>) -> Came {
    fetched_into(tempfile::tempdir().unwrap(), source, told(givers), None)
}

fn fetched_into(cache: tempfile::TempDir, source: &Server, suppliers: Arc<Suppliers>, commit: Option<String>) -> Came {
    let progress = Arc::new(Progress::default());
    let fetched = runtime().block_on(fetch(order(source, &cache, suppliers, commit), progress.clone())).unwrap();
    for (name, content) in &*MODEL {
        assert!(fs::read(fetched.dir.join(name)).unwrap() == *content, "{name}: other bytes");
    }
    let snapshot = progress.at(Instant::now());
    assert_eq!(snapshot.bytes_done, snapshot.bytes_total);
    Came { fetched, progress: snapshot, notices: progress.take_notices().join("\n"), _cache: cache }
}

fn order(source: &Server, cache: &tempfile::TempDir, suppliers: Arc<Suppliers>, commit: Option<String>) -> Order {
    let cache = cache.path().to_owned();
    let source = format!("http://{}/", source.address).parse().unwrap();
    Order { source, access: Access::default(), commit, cache, limit: None, connections: 8, suppliers }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Bytes of a chunk of the weights that are noted as there.
fn noted(cache: &tempfile::TempDir, chunk_idx: usize) -> u64 {
    let models = fs::read_dir(cache.path().join("partial")).into_iter().flatten().flatten();
    let files = models.flat_map(|model| fs::read_dir(model.path()).into_iter().flatten().flatten());
    let mut paths = files
        .map(|file| file.path())
        .filter(|path| path.extension().is_some_and(|end| end == "state"))
        .filter_map(|path| fs::read(path).ok());
    let notes = paths.find(|notes| notes.len() > 8 * chunk_idx);
    notes.map_or(0, |notes| u64::from_le_bytes(notes.as_chunks::<8>().0[chunk_idx]))
}

#[test]
fn what_replicas_have_the_source_is_not_asked_for() {
    let (source, [one, other]) = (Server::source(Fault::Nothing), [(); 2].map(|()| Server::replica(Fault::Nothing)));
    let came = fetched(&source, vec![one.giver("one"), other.giver("other")]);
    assert_eq!(source.weights_sent(), 0);
    assert_eq!((came.progress.bytes_given, came.notices.as_str()), (came.progress.bytes_total, ""));
    let mut ranges = [one.ranges(), other.ranges()].concat();
    ranges.sort_by_key(|range| range.start);
    assert_eq!(ranges, [0..CHUNK_BYTES as usize, CHUNK_BYTES as usize..WEIGHTS_BYTES], "no byte twice");
    for (server, name) in [(&one, "one"), (&other, "other")] {
        let shown = server.tickets.lock().unwrap().clone();
        assert!(shown.iter().all(|ticket| ticket.as_deref() == Some(&format!("for {name}"))), "{shown:?}");
    }
    assert!(source.tickets.lock().unwrap().iter().all(Option::is_none), "a ticket is for nobody else");
}

#[test]
fn where_one_breaks_off_others_go_on_and_no_byte_is_fetched_twice() {
    const CUT: usize = 5 << 20;
    let (source, dies) = (Server::source(Fault::Nothing), Server::replica(Fault::Cut(CUT)));
    let came = fetched(&source, vec![dies.giver("dies")]);
    assert!(came.progress.bytes_given >= CUT as u64, "what it gave until then stays");
    assert!(source.ranges().iter().all(|range| range.start >= CUT), "{:?}", source.ranges());
}

#[test]
fn who_is_gone_is_left_by_name_and_the_source_goes_on() {
    let source = Server::source(Fault::Nothing);
    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().to_string();
    let gone = Giver { name: "gone".to_owned(), url: format!("http://{nobody}/"), headers: BTreeMap::new() };
    let came = fetched(&source, vec![gone]);
    assert_eq!((came.progress.bytes_given, source.weights_sent()), (0, WEIGHTS_BYTES));
}

#[test]
fn wrong_bytes_are_found_named_and_fetched_again_alone() {
    let (source, liar) = (Server::source(Fault::Nothing), Server::replica(Fault::Wrong(CHUNK_BYTES as usize + 7)));
    let came = fetched(&source, vec![liar.giver("liar")]);
    assert!(came.notices.contains("model.safetensors: wrong bytes, of which liar gave some"), "{}", came.notices);
    assert!(source.weights_sent() >= CHUNK_BYTES as usize, "what the liar gave comes from the source");
    assert!(came.progress.bytes_given < 1 << 20, "wrong bytes do not count: {}", came.progress.bytes_given);
}

#[test]
fn what_a_liar_did_not_give_is_not_fetched_again() {
    // A fetch ends in the middle, when the source gave all of the second chunk and not all of the first; a liar gives the rest.
    let (source, cache) = (Server::source(Fault::Slow(Duration::from_millis(3))), tempfile::tempdir().unwrap());
    let second = CHUNK_BYTES as usize..WEIGHTS_BYTES;
    let runtime = runtime();
    runtime.block_on(async {
        let middle = async {
            while noted(&cache, 1) < second.len() as u64 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            _ended = fetch(order(&source, &cache, Arc::default(), None), Arc::default()) => panic!("it is in the middle"),
            () = middle => {}
        }
    });
    assert!(noted(&cache, 0) < CHUNK_BYTES);
    // As who is killed: nobody waits for what hashes.
    runtime.shutdown_background();
    let before = source.ranges().len();

    let liar = Server::replica(Fault::Wrong(CHUNK_BYTES as usize - 7));
    let came = fetched_into(cache, &source, told(vec![liar.giver("liar")]), None);
    assert!(came.notices.contains("of which liar gave some"), "{}", came.notices);
    let first = 0..CHUNK_BYTES as usize;
    assert_eq!(source.ranges()[before..], [first], "what the source gave of the other chunk is right");
}

#[test]
fn a_fetch_that_nobody_waits_for_ends_and_the_next_one_waits_until_it_has() {
    let (source, cache) = (Server::source(Fault::Slow(Duration::from_millis(3))), tempfile::tempdir().unwrap());
    let (progress, runtime) = (Arc::new(Progress::default()), runtime());
    let (is_free, n_left) = runtime.block_on(async {
        let begun = async {
            while noted(&cache, 0) == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            _ended = fetch(order(&source, &cache, Arc::default(), None), Arc::clone(&progress)) => panic!("it has begun"),
            () = begun => {}
        }
        let locks = fs::read_dir(cache.path().join("locks")).unwrap();
        let lock = fs::File::open(locks.map(|lock| lock.unwrap().path()).next().unwrap()).unwrap();
        let given_up = Instant::now();
        let mut is_free = lock.try_lock().is_ok();
        while !is_free && given_up.elapsed() < Duration::from_secs(60) {
            tokio::time::sleep(Duration::from_millis(2)).await;
            is_free = lock.try_lock().is_ok();
        }
        (is_free, Arc::strong_count(&progress) - 1)
    });
    // It would wait for a thread that does not end.
    runtime.shutdown_background();
    assert!(is_free, "a thread of it is left");
    assert_eq!(n_left, 0, "whoever could go on held the lock");
}

#[test]
fn who_is_slow_is_left_for_who_is_fast() {
    let (source, fast) = (Server::source(Fault::Nothing), Server::replica(Fault::Nothing));
    let slow = Server::replica(Fault::Slow(Duration::from_millis(150)));
    let came = fetched(&source, vec![slow.giver("slow"), fast.giver("fast")]);
    assert!(slow.weights_sent() < CHUNK_BYTES as usize / 2, "{} of its part", slow.weights_sent());
    assert!(fast.weights_sent() > CHUNK_BYTES as usize / 2, "{} given", came.progress.bytes_given);
}

#[test]
fn who_lacks_a_file_gives_the_others() {
    let (source, lacks) = (Server::source(Fault::Nothing), Server::replica(Fault::Lacks));
    let came = fetched(&source, vec![lacks.giver("lacks")]);
    assert_eq!(source.weights_sent(), WEIGHTS_BYTES);
    assert_eq!(came.progress.bytes_given, 10, "config.json and tokenizer.json");
    assert_eq!(came.notices, "");
}

#[test]
fn who_gives_all_for_a_part_and_who_refuses_is_left_with_the_reason() {
    for (fault, reason) in [
        (Fault::NoRange, "nothing more is taken from odd: it answers without the range that was asked for"),
        (Fault::Says(403), "nothing more is taken from odd: 403 Forbidden: no"),
    ] {
        let (source, odd) = (Server::source(Fault::Nothing), Server::replica(fault));
        let came = fetched(&source, vec![odd.giver("odd")]);
        assert!(came.notices.contains(reason), "{}", came.notices);
        assert_eq!((came.progress.bytes_given, source.weights_sent()), (0, WEIGHTS_BYTES));
    }
}

#[test]
fn who_has_enough_to_do_is_not_waited_for() {
    let (source, busy) = (Server::source(Fault::Nothing), Server::replica(Fault::Says(503)));
    let came = fetched(&source, vec![busy.giver("busy")]);
    assert_eq!((came.notices.as_str(), source.weights_sent()), ("", WEIGHTS_BYTES));
}

#[test]
fn who_was_told_the_commit_waits_for_the_first_word_and_not_for_ever() {
    let source = Server::source(Fault::Nothing);
    let commit = fetched(&source, Vec::new()).fetched.commit;
    let before = source.weights_sent();
    let replica = Server::replica(Fault::Nothing);
    let suppliers = Suppliers::awaiting(Instant::now() + Duration::from_secs(600), None).unwrap();
    let word = replica.giver("late");
    let came = std::thread::scope(|scope| {
        let suppliers = Arc::new(suppliers);
        let told = suppliers.clone();
        scope.spawn(move || {
            sleep(Duration::from_millis(300));
            told.tell(vec![word], Instant::now());
        });
        fetched_into(tempfile::tempdir().unwrap(), &source, suppliers, Some(commit.clone()))
    });
    assert_eq!((source.weights_sent(), came.progress.bytes_given), (before, came.progress.bytes_total));

    // Nobody says anything: the wait ends.
    let silent = Suppliers::awaiting(Instant::now() + Duration::from_millis(200), None).unwrap();
    let came = fetched_into(tempfile::tempdir().unwrap(), &source, Arc::new(silent), Some(commit));
    assert_eq!((came.progress.bytes_given, source.weights_sent()), (0, before + WEIGHTS_BYTES));
}
