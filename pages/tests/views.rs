//! Values in, HTML out, read by an HTML parser that others made: valid, bounded, and nothing of what others wrote is markup.

use std::collections::HashSet;

use html5ever::{ParseOpts, parse_document, tendril::TendrilSink, tree_builder::TreeBuilderOpts};
use markup5ever_rcdom::{Handle, NodeData, RcDom};
use stoker_pages::{
    deployment::{
        self, Change, Condition, Decision, Deployment, DeploymentQuery, History, Opened, Point, Range, ReplicaLoad,
        ReplicaRow, RevisionCount, Scaling, Settings, Told, WhatIf,
    },
    fleet::{self, Fleet, FleetQuery, ROWS},
    layout::message,
    report::{Course, Line, Report, Section},
    view::{Gpus, Latency, Load, Replicas, State, Summary, Tone},
};

const NOW_MS: u64 = 1_763_892_671_000;
const EVIL: &str = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;\u{0}";
/// Of a whole page with what it needs.
const PAGE_BYTES: usize = 100_000;

/// What a parser finds in a page.
#[derive(Default)]
struct Found {
    elements: Vec<(String, Vec<(String, String)>)>,
    text: String,
}

/// Parses strictly: what a validator would complain about in the markup fails.
fn parsed(page: &str) -> Found {
    let tree_builder = TreeBuilderOpts { exact_errors: true, ..TreeBuilderOpts::default() };
    let dom = parse_document(RcDom::default(), ParseOpts { tree_builder, ..ParseOpts::default() }).one(page);
    let errors = dom.errors.borrow().clone();
    assert!(errors.is_empty(), "{errors:?}\n{page}");
    let mut found = Found::default();
    walk(&dom.document, &mut found);
    found
}

fn walk(node: &Handle, found: &mut Found) {
    match &node.data {
        NodeData::Element { name, attrs, .. } => {
            let attributes = attrs.borrow();
            let attributes = attributes.iter().map(|one| (one.name.local.to_string(), one.value.to_string()));
            found.elements.push((name.local.to_string(), attributes.collect()));
        }
        NodeData::Text { contents } => found.text.push_str(&contents.borrow()),
        _ => {}
    }
    for child in node.children.borrow().iter() {
        walk(child, found);
    }
}

impl Found {
    fn count(&self, element: &str) -> usize {
        self.elements.iter().filter(|(name, _)| name == element).count()
    }

    fn all(&self, attribute: &str) -> Vec<&str> {
        let attributes = self.elements.iter().flat_map(|(_, attributes)| attributes);
        attributes.filter(|(name, _)| name == attribute).map(|(_, value)| value.as_str()).collect()
    }
}

/// What every page keeps to.
fn check(page: &str) -> Found {
    let found = parsed(page);
    for (name, attributes) in &found.elements {
        for (attribute, value) in attributes {
            assert!(attribute != "style" && !attribute.starts_with("on"), "{name} {attribute}={value}");
            let elsewhere = ["http:", "https:", "//", "javascript:", "data:"];
            let leads = matches!(attribute.as_str(), "href" | "src" | "action" | "data-events");
            assert!(!leads || elsewhere.iter().all(|start| !value.starts_with(start)), "{name} {attribute}={value}");
        }
        assert!(!matches!(name.as_str(), "style" | "iframe" | "object" | "base" | "img"), "{name}");
        assert!(
            name != "script" || attributes.iter().any(|(name, value)| name == "src" && value.starts_with("/assets/"))
        );
    }
    let ids = found.all("id");
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len(), "each id once: {ids:?}");
    let labels: HashSet<&str> = found.all("for").into_iter().collect();
    for (name, attributes) in &found.elements {
        let of = |wanted: &str| attributes.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
        let is_field = matches!(name.as_str(), "input" | "select" | "textarea") && of("type") != Some("hidden");
        assert!(!is_field || of("id").is_some_and(|id| labels.contains(id)), "{name} without a label: {attributes:?}");
    }
    assert_eq!((found.count("h1"), found.count("main")), (1, 1));
    found
}

fn summary(idx: usize) -> Summary {
    Summary {
        namespace: format!("team-{}", idx % 7),
        name: format!("chat-{idx:04}"),
        model: "hf://example/a-model-of-some-length".into(),
        state: State {
            tone: Tone::Good,
            word: "Serving".into(),
            message: "10 of 10 replicas serve revision 3f2a".into(),
        },
        replicas: Replicas { wanted: 10, serving: 10, starting: 2, leaving: 1 },
        load: Load {
            kv: Some(idx as f64 / 1000.0),
            running: 123,
            waiting: 45,
            tokens: Some(12_345.6),
            ttft: Latency { p50: Some(0.123), p95: Some(1.234) },
            itl: Latency { p50: Some(0.012), p95: Some(0.034) },
            preemptions: 3,
            fresh: 10,
        },
        gpus: Gpus { used: 20, waiting: 2 },
    }
}

fn fleet(n_deployments: usize) -> Fleet {
    Fleet { all: (0..n_deployments).map(summary).collect(), now_ms: NOW_MS }
}

fn evil_summary() -> Summary {
    Summary {
        namespace: EVIL.into(),
        name: EVIL.into(),
        model: EVIL.repeat(1_000),
        state: State { tone: Tone::Bad, word: EVIL.into(), message: EVIL.repeat(1_000) },
        ..summary(0)
    }
}

fn full(words: &str, n_replicas: usize) -> Deployment {
    let points = (0..245).map(|idx| Point {
        at_ms: NOW_MS - 3_600_000 + idx * 10_000,
        wanted: Some((idx % 7) as f64),
        serving: Some((idx % 5) as f64),
        kv: (idx % 3 > 0).then_some((idx % 10) as f64 / 10.0),
        running: Some(idx as f64),
        waiting: Some((idx % 11) as f64),
        tokens: Some(idx as f64 * 7.7),
        ttft: Some((idx % 13) as f64 / 10.0),
        itl: None,
    });
    let replica = |idx: usize| ReplicaRow {
        pod: format!("{words}-{idx}"),
        node: format!("{words}-{}", idx % 4),
        older_revision: Some(words.into()),
        tone: Tone::Wait,
        phase: words.into(),
        words: words.into(),
        progress: Some(0.5),
        load: (!idx.is_multiple_of(2)).then(ReplicaLoad::default),
        created_ms: NOW_MS - 90_000_000,
    };
    let decision = Decision { at_ms: NOW_MS - 5_000, words: words.into(), is_reproduced: false };
    let change = |idx: u64| Change {
        at_ms: NOW_MS - 100_000 * idx,
        from: 1,
        to: 3,
        pressure_percent: 240,
        cause: words.into(),
        bound: words.into(),
        has_record: !idx.is_multiple_of(2),
    };
    let settings = Settings {
        min: 1,
        max: 3,
        kv: 0.8,
        slowdown: None,
        queue: 1.0,
        ttft: Some(500.0),
        itl: None,
        late: 0.03,
        hour: 3.0,
        spare: Some(1),
    };
    let told = Told { at_ms: NOW_MS, tone: Tone::Bad, reason: words.into(), note: words.into() };
    let condition = Condition {
        type_: "Ready".into(),
        status: "False".into(),
        tone: Tone::Bad,
        reason: words.into(),
        message: words.into(),
        since_ms: NOW_MS,
    };
    Deployment {
        summary: Summary { namespace: words.into(), name: words.into(), ..summary(1) },
        revision: words.into(),
        url: words.into(),
        now_ms: NOW_MS,
        created_ms: NOW_MS - 7_200_000,
        leads_since_ms: NOW_MS - 60_000,
        progress: words.into(),
        replicas: (0..n_replicas).map(replica).collect(),
        n_more_replicas: 940,
        revisions: vec![RevisionCount { revision: words.into(), ..RevisionCount::default() }; 2],
        history: History { points: points.collect(), step_ms: 10_000, n_witnesses: 9 },
        scaling: Scaling {
            who: words.into(),
            settings: Some(settings),
            kv_target: Some(0.8),
            changes: (1..=20).map(change).collect(),
            opened: Opened::Asked(decision),
            what_if: Some(WhatIf {
                errors: vec![],
                points: (0..300).map(|idx| (NOW_MS + idx * 2_000, 2, 3)).collect(),
            }),
            recorded: Some((NOW_MS - 600_000, NOW_MS, 300)),
            limits: vec![condition.clone(); 2],
        },
        events: vec![told; 30],
        conditions: vec![condition; 7],
    }
}

#[test]
fn a_thousand_deployments_are_a_page_of_less_than_100_kilobytes() {
    let page = fleet::page(&fleet(1000), &FleetQuery::default());
    let assets = stoker_pages::assets::STYLE.text.len() + stoker_pages::live::SCRIPT.text.len();
    assert!(page.len() + assets < PAGE_BYTES, "{} + {assets}", page.len());
    let found = check(&page);
    assert_eq!(found.count("tr"), ROWS + 1);
    assert!(found.text.contains("1 to 50 of 1000"));
}

#[test]
fn names_messages_and_labels_of_any_kind_and_length_stay_text() {
    let evil = Fleet { all: vec![evil_summary()], now_ms: NOW_MS };
    let query = FleetQuery { q: EVIL.into(), ns: EVIL.into(), ..FleetQuery::default() };
    for page in [
        fleet::page(&evil, &FleetQuery::default()),
        fleet::page(&evil, &query),
        deployment::page(&full(EVIL, 50), &DeploymentQuery::default()),
        deployment::absent(EVIL, EVIL),
        message(EVIL, EVIL),
    ] {
        // A NUL is no character of HTML, and no name has one: only here it would be an error of the page.
        check(&page.replace('\u{0}', ""));
        assert!(!page.contains("<script>alert") && !page.contains("<img"), "{page}");
        assert!(page.len() < PAGE_BYTES, "{} bytes", page.len());
    }
}

#[test]
fn the_fullest_page_of_a_deployment_is_small_and_valid() {
    let view = full("words of a usual length", 50);
    for (range, ..) in Range::ALL {
        let query = DeploymentQuery { range, at: Some(NOW_MS - 100_000), ..DeploymentQuery::default() };
        let page = deployment::page(&view, &query);
        let assets = stoker_pages::assets::STYLE.text.len() + stoker_pages::live::SCRIPT.text.len();
        assert!(page.len() + assets < PAGE_BYTES, "{} + {assets}", page.len());
        check(&page);
    }
    // Names are short, the API server sees to that; what others wrote is not.
    let mut long = full(&"x".repeat(65_536), 50);
    (long.summary.namespace, long.summary.name) = ("default".into(), "chat".into());
    let page = deployment::page(&long, &DeploymentQuery::default());
    assert!(page.len() < PAGE_BYTES, "{} bytes", page.len());
}

#[test]
fn a_deployment_of_which_nothing_is_known_has_a_page() {
    let found = check(&deployment::page(&Deployment::default(), &DeploymentQuery::default()));
    assert!(found.text.contains("No point yet") && found.text.contains("No replica."));
    check(&fleet::page(&Fleet::default(), &FleetQuery::default()));
}

#[test]
fn what_keeps_wanted_replicas_from_being_had_stands_where_their_number_is_explained() {
    let mut view = full("w", 3);
    view.scaling.limits[0].reason = "BudgetSpent".into();
    view.scaling.limits[0].message = "2 of 3 replicas are granted".into();
    let why = |view: &Deployment| {
        let page = deployment::page(view, &DeploymentQuery::default());
        check(&page);
        page.split("id=\"why\"").nth(1).unwrap().split("</section>").next().unwrap().to_owned()
    };
    assert!(why(&view).contains("BudgetSpent: 2 of 3 replicas are granted"), "{}", why(&view));
    view.scaling.limits.clear();
    assert!(!why(&view).contains("note wait"), "{}", why(&view));
}

#[test]
fn older_decisions_are_folded_unless_one_of_them_is_asked_for() {
    let older = |at| {
        let query = DeploymentQuery { at, ..DeploymentQuery::default() };
        let page = deployment::page(&full("w", 3), &query);
        page.split("<details id=\"older-decisions\"").nth(1).unwrap().split("</summary>").next().unwrap().to_owned()
    };
    assert_eq!(older(None), "><summary>14 older");
    assert_eq!(older(Some(NOW_MS - 100_000)), "><summary>14 older", "the newest of all is seen anyway");
    assert_eq!(older(Some(NOW_MS - 2_000_000)), " open><summary>14 older");
}

#[test]
fn what_is_dated_after_now_breaks_no_page() {
    let mut view = full("w", 3);
    view.now_ms -= 7_200_000;
    for (range, ..) in Range::ALL {
        let query = DeploymentQuery { range, at: Some(NOW_MS - 100_000), ..DeploymentQuery::default() };
        let found = check(&deployment::page(&view, &query));
        assert_eq!(found.count("g"), 0, "no decision stands in a picture that ends before it: {range:?}");
    }
}

#[test]
fn what_was_before_this_operator_led_is_said_to_be_remembered_or_gone() {
    let said = |n_witnesses, leads_since_ms| {
        let mut view = full("w", 3);
        view.history.n_witnesses = n_witnesses;
        view.leads_since_ms = leads_since_ms;
        let query = DeploymentQuery { range: Range::Hour, ..DeploymentQuery::default() };
        check(&deployment::page(&view, &query)).text
    };
    assert!(said(0, NOW_MS - 60_000).contains("What it read is not known any more."));
    assert!(said(1, NOW_MS - 60_000).contains("what one replica that still runs remembers"));
    assert!(said(9, NOW_MS - 60_000).contains("what 9 replicas that still run remember"));
    assert!(!said(9, NOW_MS - 3_600_000).contains("another operator led"), "it is not in the picture");
    let mut younger = full("w", 3);
    younger.created_ms = younger.leads_since_ms + 1;
    let found = check(&deployment::page(&younger, &DeploymentQuery::default()));
    assert!(!found.text.contains("another operator led"), "it was made after");
}

#[test]
fn a_report_is_one_valid_file_that_asks_for_nothing() {
    let line = Line { name: EVIL.into(), points: vec![(0.0, 1.0), (60.0, f64::NAN), (90.0, 7.0)] };
    let course = Course { name: EVIL.into(), lines: vec![line; 6] };
    let section = Section {
        title: EVIL.into(),
        columns: vec![EVIL.into(), "late".into()],
        rows: vec![vec![EVIL.into(), "3".into()]; 4],
        ratios: vec![0.25, 1.5, f64::NAN, f64::INFINITY],
        courses: vec![course, Course::default()],
        along: Some(EVIL.into()),
    };
    let report = Report { title: EVIL.into(), about: EVIL.into(), sections: vec![section, Section::default()] };
    let page = report.render();
    let found = parsed(&page.replace('\u{0}', ""));
    assert!(found.all("href").is_empty() && found.all("src").is_empty() && found.count("script") == 0);
    assert_eq!((found.count("svg"), found.count("tr"), found.count("img")), (2 + 4, 1 + 4, 0));
    let bars: Vec<_> =
        found.elements.iter().filter(|(name, _)| name == "rect").map(|(_, attributes)| attributes).collect();
    let of =
        |idx: usize, name: &str| bars[idx].iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str());
    assert_eq!(bars.len(), 3, "what is no number has no bar");
    assert_eq!([of(0, "x"), of(0, "width"), of(0, "class")], [Some("2.0"), Some("58.0"), Some("behind")]);
    assert_eq!(
        [of(1, "x"), of(2, "width"), of(2, "class")],
        [Some("60.0"), Some("58.0"), Some("")],
        "ahead, also without end"
    );
    assert!(page.contains("default-src 'none'") && !page.contains("url("), "nothing comes from elsewhere");
}

#[test]
fn each_part_is_one_element_with_its_own_id() {
    let (rows, _) = fleet::fragments(&fleet(3), &FleetQuery::default(), Some(3));
    let (table, n_rows) = fleet::fragments(&fleet(3), &FleetQuery::default(), None);
    let parts = deployment::parts(&full("w", 3), &DeploymentQuery::default());
    assert_eq!(n_rows, 3);
    assert_eq!(
        rows.iter().map(|part| part.id.as_str()).collect::<Vec<_>>(),
        ["facts", "row-0", "row-1", "row-2", "pager"]
    );
    for part in rows.iter().chain(&table).chain(&parts).chain([&deployment::gone()]) {
        let (tag, id) = (part.html.split([' ', '>']).next().unwrap(), format!("id=\"{}\"", part.id));
        assert!(part.html.split('>').next().unwrap().contains(&id), "{}", part.html);
        assert!(part.html.ends_with(&format!("</{}>", &tag[1..])), "{}", part.html);
    }
}

#[test]
fn rows_are_sorted_and_filtered_as_the_address_says() {
    let mut all = fleet(3);
    all.all[1].state.tone = Tone::Bad;
    all.all[2].load.kv = None;
    let names = |query: FleetQuery| -> Vec<String> {
        let page = parsed(&fleet::page(&all, &query));
        let links =
            page.all("href").into_iter().filter_map(|href| href.rsplit_once("/chat-").map(|(_, name)| name.to_owned()));
        links.collect()
    };
    let sorted = |word: &str, descending| {
        let order = match word {
            "kv" => fleet::Order::Kv,
            _ => fleet::Order::Name,
        };
        FleetQuery { sort: fleet::Sort { order, descending }, ..FleetQuery::default() }
    };
    assert_eq!(names(FleetQuery::default()), ["0001", "0000", "0002"], "who is in trouble comes first");
    assert_eq!(names(sorted("kv", true)), ["0001", "0000", "0002"], "what is not known comes last");
    assert_eq!(names(sorted("name", true)), ["0002", "0001", "0000"]);
    assert_eq!(names(FleetQuery { ns: "team-2".into(), ..FleetQuery::default() }), ["0002"]);
    assert_eq!(names(FleetQuery { q: " CHAT-0000 ".into(), ..FleetQuery::default() }), ["0000"]);
    assert_eq!(names(FleetQuery { state: "trouble".into(), ..FleetQuery::default() }), ["0001"]);
    assert!(names(FleetQuery { q: "nobody".into(), ..FleetQuery::default() }).is_empty());
    assert_eq!(names(FleetQuery { page: usize::MAX, ..FleetQuery::default() }).len(), 3, "the last page there is");
}

#[test]
fn what_changed_within_a_look_is_less_than_20_kilobytes_a_second() {
    let (rows, _) = fleet::fragments(&fleet(1000), &FleetQuery::default(), Some(ROWS));
    let bytes: usize = rows.iter().map(|part| part.message().len()).sum();
    assert!(bytes / 2 < 20_000, "{bytes} bytes in two seconds if everything changes");
}
