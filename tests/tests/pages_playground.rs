//! The playground in a real browser: served by a real agent, by a real gateway, and by a server that says hostile things.

use std::{
    convert::Infallible,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use axum::{
    Json, Router,
    body::Body,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use stoker_crds::endpoints::EndpointState;
use stoker_edge::playground::Playground;
use stoker_tests::{
    agent::AgentProcess,
    browser::{Browser, Key},
    gateway::{GatewayProcess, Teller, deployment, replica},
    looks::{draw, looks_well},
    playground::{
        ANSWERED, a_schema_is_used, a_stream_is_stopped, a_tool_is_used, ask, count, last_answer, open, send,
    },
    process::Process,
    python::python_with,
    skip::skip,
};
use tokio::net::TcpListener;

const REQUIREMENTS: &str = include_str!("../clients/requirements.txt");
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_streamed_stopped_edited_and_sent_again() -> Result<()> {
    let Some(browser) = Browser::start("a_chat_is_streamed_stopped_edited_and_sent_again").await? else {
        return Ok(());
    };
    let agent = AgentProcess::ready(&[]).await?;
    open(&browser, agent.base(), &json!({"a.temperature": "0"})).await?;
    assert!(ask(&browser, "Who are you?").await?.contains("ember"));

    // A second line is no end of the message.
    browser.fill("#draft", "Tell me").await?;
    browser.press(Key::ShiftEnter).await?;
    assert_eq!(browser.value("document.querySelector('#draft').value").await?, json!("Tell me\n"));
    ask(&browser, "Tell me a story about the sea.").await?;
    assert_eq!(count(&browser, ".turn").await?, 2);
    let facts = browser.text(".turn:last-child .facts-line").await?;
    assert!(
        ["first token", " ms", "tokens/s", "tokens", "finished"].iter().all(|word| facts.contains(word)),
        "{facts}"
    );

    browser.click(".turn:first-child .question .tools button").await?;
    browser.fill(".editor textarea", "What is the capital of France?").await?;
    browser.press(Key::Enter).await?;
    browser.wait_until("asked anew", &format!("document.querySelectorAll('.turn').length === 1 && {ANSWERED}")).await?;
    assert_eq!(browser.text(".question .text").await?, "What is the capital of France?");
    let first = last_answer(&browser).await?;
    browser.click(".answer .tools button:nth-child(3)").await?;
    browser.wait_until("answered again", ANSWERED).await?;
    assert_eq!(last_answer(&browser).await?, first, "greedy: the same request gives the same answer");

    let form = json!({"mode": "completion", "probabilities": 1, "a.temperature": "0", "a.max_tokens": "12"});
    open(&browser, agent.base(), &form).await?;
    let completion = ask(&browser, "The sea was").await?;
    assert_eq!(browser.text(".question .who").await?, "Prompt");
    let tokens =
        browser.value("[...document.querySelectorAll('.token')].map(token => token.textContent).join('')").await?;
    assert_eq!((tokens, count(&browser, ".token").await?), (json!(completion), 12));

    a_stream_is_stopped(&browser, agent.base()).await?;
    agent.wait_until("idle", |load| load.running == 0 && load.waiting == 0).await?;
    assert_eq!(browser.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_answers_stand_side_by_side_with_the_probability_of_each_token() -> Result<()> {
    let test = "two_answers_stand_side_by_side_with_the_probability_of_each_token";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let agent = AgentProcess::ready(&[]).await?;
    open(&browser, agent.base(), &json!({"a.temperature": "0", "b.temperature": "1.5", "b.seed": "7"})).await?;
    browser.click("#compare").await?;
    browser.click("#probabilities").await?;
    ask(&browser, "Tell me a story about the sea.").await?;
    assert_eq!(count(&browser, ".answers.two > .answer").await?, 2);
    let side_by_side = "(([a, b]) => a.top === b.top && a.right <= b.left)
        ([...document.querySelectorAll('.answer')].map(answer => answer.getBoundingClientRect()))";
    assert_eq!(browser.value(side_by_side).await?, json!(true));
    assert_ne!(browser.text(".answer:first-child .text").await?, browser.text(".answer:last-child .text").await?);

    // The greedy side takes the likeliest token everywhere; what is shown for a token adds up to no more than all.
    browser.hover(".answer:first-child .token:nth-child(2)").await?;
    browser.wait_for("#tip").await?;
    let likeliest = "[...document.querySelectorAll('#tip tr')].findIndex(row => row.className === 'chosen')";
    assert_eq!(browser.value(likeliest).await?, json!(0), "{}", browser.text("#tip").await?);
    let sum = "[...document.querySelectorAll('#tip td.num')].reduce((sum, cell) => sum + (parseFloat(cell.textContent) || 0), 0)";
    let sum = browser.value(sum).await?.as_f64().context("a sum")?;
    assert!(sum > 0.0 && sum < 100.5, "{sum}");

    // By keyboard: one stop for all tokens, arrows between them.
    assert_eq!(count(&browser, ".answer:first-child .token[tabindex='0']").await?, 1);
    browser.focus(".answer:first-child .token[tabindex='0']").await?;
    browser
        .value("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))")
        .await?;
    let moved = "document.activeElement === document.querySelectorAll('.answer:first-child .token')[1] &&
        document.activeElement.getAttribute('aria-describedby') === 'tip'";
    assert_eq!(browser.value(moved).await?, json!(true));
    assert_eq!(browser.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tools_and_schemas_are_checked_before_they_are_sent_and_after() -> Result<()> {
    let test = "tools_and_schemas_are_checked_before_they_are_sent_and_after";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let agent = AgentProcess::ready(&[]).await?;
    a_tool_is_used(&browser, agent.base()).await?;
    a_schema_is_used(&browser, agent.base()).await?;

    // What is no JSON is not sent, and says where.
    browser.fill("#schema", "{\"type\": \"object\",\n  \"required\": [,]}").await?;
    browser
        .wait_until(
            "said where",
            "document.querySelector('#schema-says').textContent.startsWith('Line 2, column 16: ')",
        )
        .await?;
    send(&browser, "Who are you?").await?;
    assert_eq!(count(&browser, ".turn").await?, 1, "nothing was sent");
    browser.fill("#schema", r#"{"type": "string", "format": "date"}"#).await?;
    browser
        .wait_until(
            "said what",
            "document.querySelector('#schema-says').textContent.endsWith('does not check: format')",
        )
        .await?;
    assert_eq!(browser.complaints(), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_copied_code_gives_the_same_answer() -> Result<()> {
    let test = "the_copied_code_gives_the_same_answer";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let agent = AgentProcess::ready(&[]).await?;
    let said = "It's \"quoted\", $HOME `pwd` \\n \\\\ %s ${x} {{y}} é 😀 \u{2028} </script> 'a' ''";
    let form = json!({"a.temperature": "0", "a.max_tokens": "24", "a.top_k": "40", "a.system": "Answer in one line; it's short.",
        "a.stop": "\u{1f600}\n'"});
    open(&browser, agent.base(), &form).await?;
    let answer = ask(&browser, said).await?;
    ensure!(!answer.is_empty(), "ember says something");
    browser.click(".answer .tools button:nth-child(4)").await?;
    for (language, programs) in [("curl", vec![("sh", "-c")]), ("javascript", vec![("node", "-e")]), ("python", vec![])]
    {
        browser.value(&format!("document.querySelector('[name=language][value={language}]').click()")).await?;
        let code = browser.value("document.querySelector('#code').textContent").await?;
        let code = code.as_str().context("code")?.to_owned();
        let (program, flag): (PathBuf, &str) = match programs.first() {
            Some((program, flag)) => ((*program).into(), *flag),
            None => match tokio::task::spawn_blocking(|| python_with(REQUIREMENTS)).await? {
                Ok(python) => (python, "-c"),
                Err(reason) => {
                    skip(test, &format!("python: {reason:#}"));
                    continue;
                }
            },
        };
        // So that a module of JavaScript's may wait at its top.
        let code = if language == "javascript" { format!("(async () => {{\n{code}\n}})()") } else { code };
        let run = tokio::task::spawn_blocking(move || Command::new(program).arg(flag).arg(code).output()).await?;
        let output = match run {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                skip(test, &format!("{language}: {error}"));
                continue;
            }
            run => run?,
        };
        let printed = String::from_utf8(output.stdout)?;
        if language == "curl" && output.status.code() == Some(127) {
            skip(test, "no curl");
            continue;
        }
        ensure!(output.status.success(), "{language}: {}", String::from_utf8_lossy(&output.stderr));
        let given = match language {
            "curl" => serde_json::from_str::<Value>(&printed)?["choices"][0]["message"]["content"].clone(),
            "python" => json!(printed.strip_suffix('\n').unwrap_or(&printed)),
            // Node prints an object as it likes; the answer is in it.
            _ => {
                let content = answer.replace('\\', "\\\\").replace('\n', "\\n");
                ensure!(printed.contains(&content) || printed.contains(&answer.replace('\'', "\\'")), "{printed}");
                continue;
            }
        };
        assert_eq!(given, json!(answer), "{language}");
    }
    browser.press(Key::Escape).await?;
    browser.wait_until("closed", "!document.querySelector('#code-dialog').open").await?;
    Ok(())
}

/// A server that has the page and says what it is told to.
async fn scripted(models: Value, stream: String) -> Result<String> {
    let chunks = move || {
        // In pieces that respect neither events nor characters.
        let pieces: Vec<Result<Vec<u8>, Infallible>> =
            stream.as_bytes().chunks(7).map(|piece| Ok(piece.to_vec())).collect();
        let body = Body::from_stream(futures::stream::iter(pieces));
        async move { ([("content-type", "text/event-stream")], body).into_response() as Response }
    };
    let router = Playground::On
        .routes::<()>()
        .route("/v1/models", get(move || async move { Json(models) }))
        .route("/v1/chat/completions", post(chunks));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let base = format!("http://{}", listener.local_addr()?);
    // It ends with the test.
    tokio::spawn(async move { axum::serve(listener, Router::new().merge(router)).await });
    Ok(base)
}

fn events(deltas: &[Value]) -> String {
    deltas.iter().map(|delta| format!("data: {}\r\n\r\n", json!({"choices": [{"index": 0, "delta": delta}]}))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_model_says_is_text() -> Result<()> {
    let Some(browser) = Browser::start("whatever_a_model_says_is_text").await? else { return Ok(()) };
    let evil =
        "</pre><script>window.evil = 1</script><img src=x onerror=\"window.evil = 1\"><svg onload=window.evil=1>";
    let token =
        json!({"token": evil, "logprob": -0.1, "bytes": null, "top_logprobs": [{"token": evil, "logprob": -0.1}]});
    let deltas = events(&[
        json!({"reasoning": evil}),
        json!({"content": "smile 😀 "}),
        json!({"content": format!("```{evil}\n{evil}\n```\n{evil}")}),
        json!({"tool_calls": [{"index": 0, "id": evil, "function": {"name": evil, "arguments": evil}}]}),
    ]);
    let with_token = json!({"choices": [{"index": 0, "delta": {"content": evil}, "logprobs": {"content": [token]}}]});
    let stream = format!("{deltas}data: {with_token}\n\ndata: [DONE]\n\n");
    let base = scripted(json!({"data": [{"id": evil}, {"id": "plain"}]}), stream).await?;
    open(&browser, &base, &json!({"probabilities": 1, "draft": evil, "a.model": evil})).await?;
    let answer = ask(&browser, evil).await?;
    assert!(answer.starts_with("smile 😀 ") && answer.matches(evil).count() == 4, "{answer}");
    assert_eq!(browser.value("document.querySelector('.thoughts').open").await?, json!(false), "thoughts are folded");
    browser.click(".thoughts summary").await?;
    assert_eq!(browser.text(".thoughts pre").await?, evil);
    assert_eq!(browser.text(".call-name code").await?, evil);
    browser.hover(".token").await?;
    assert!(browser.text("#tip").await?.contains("<script>"));
    browser.click(".answer .tools button:nth-child(4)").await?;
    assert_eq!(browser.value("window.evil === undefined").await?, json!(true));
    assert_eq!(count(&browser, "main script, main img, main svg").await?, 0);
    assert_eq!(browser.complaints(), Vec::<String>::new());

    // A stream that ends too soon, and an error inside one.
    let base = scripted(json!({"data": [{"id": "m"}]}), events(&[json!({"content": "half"})])).await?;
    open(&browser, &base, &json!({})).await?;
    assert_eq!(ask(&browser, "Hello").await?, "half");
    assert!(browser.text(".after .note").await?.contains("The stream ended before the answer did"));
    let stream = format!("{}data: {}\n\n", events(&[json!({"content": "half"})]), json!({"error": {"message": evil}}));
    let base = scripted(json!({"data": [{"id": "m"}]}), stream).await?;
    open(&browser, &base, &json!({})).await?;
    ask(&browser, "Hello").await?;
    assert!(browser.text(".after .note").await?.contains(evil));
    assert_eq!(browser.value("window.evil === undefined").await?, json!(true));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_left_open_outlives_its_server() -> Result<()> {
    let Some(browser) = Browser::start("a_page_left_open_outlives_its_server").await? else { return Ok(()) };
    let mut before = Process::start("stoker-agent", &["--host", "127.0.0.1", "--port", "0"])?;
    let base = before.url("address")?;
    open(&browser, &base, &json!({"a.temperature": "0"})).await?;
    let answer = ask(&browser, "Who are you?").await?;
    before.kill()?;
    ask(&browser, "Who are you?").await?;
    let says = browser.text(".after .note").await?;
    assert!(says.contains("No answer from the server"), "{says}");
    let port = base.rsplit(':').next().context("a port")?.to_owned();
    let after = Process::start("stoker-agent", &["--host", "127.0.0.1", "--port", &port, "--admin-port", "0"])?;
    let ready = format!("{}/readyz", after.url("address")?);
    while !reqwest::get(&ready).await?.status().is_success() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    browser.click(".after .note button").await?;
    let answered = format!("!document.querySelector('.after .note') && {ANSWERED}");
    browser.wait_until("answered by the next one", &answered).await?;
    assert!(!last_answer(&browser).await?.is_empty() && !answer.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_asked_for_and_kept_nowhere() -> Result<()> {
    let Some(browser) = Browser::start("a_key_is_asked_for_and_kept_nowhere").await? else { return Ok(()) };
    let keys = tempfile::NamedTempFile::new()?;
    std::fs::write(keys.path(), "sesame-1234\n")?;
    let file = keys.path().to_str().context("a path")?;
    let agent = AgentProcess::ready(&["--api-key-file", file, "--root-path", "/llm"]).await?;
    browser.open(&agent.url("/llm")).await?;
    browser
        .wait_until("asked for", "document.querySelector('#server-says').textContent.includes('asks for an API key')")
        .await?;
    browser.complaints();
    browser.fill("#key", "sesame-1234").await?;
    browser.press(Key::Tab).await?;
    browser.wait_until("models listed", "document.querySelector('[data-option=model]').options.length > 0").await?;
    assert!(ask(&browser, "Who are you?").await?.contains("ember"));
    browser.click(".answer .tools button:nth-child(4)").await?;
    let code = browser.text("#code").await?;
    assert!(code.contains("Bearer $API_KEY") && code.contains("/llm/v1/chat/completions"), "{code}");
    browser.wait_until("remembered", "location.hash.includes('draft')").await?;
    let kept =
        "JSON.stringify([location.href, document.cookie, {...localStorage}, {...sessionStorage}, history.state])";
    let kept = browser.value(kept).await?;
    assert!(!kept.as_str().context("text")?.contains("sesame"), "{kept}");
    browser.reload().await?;
    browser
        .wait_until(
            "asked for again",
            "document.querySelector('#server-says').textContent.includes('asks for an API key')",
        )
        .await?;
    assert_eq!(browser.value("document.querySelector('#key').value").await?, json!(""));
    assert_eq!(
        browser.value("document.querySelector('#draft').value").await?,
        json!("Who are you?"),
        "the form is in the address"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_the_gateway_two_models_answer_side_by_side() -> Result<()> {
    let test = "behind_the_gateway_two_models_answer_side_by_side";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let (first, second) = tokio::try_join!(
        AgentProcess::ready(&["--served-name", "ember"]),
        AgentProcess::ready(&["--served-name", "twin"])
    )?;
    let teller = Teller::start().await?;
    let (first, second) = (replica("pod-0", &first).await?, replica("pod-1", &second).await?);
    teller.tell(vec![deployment("chat", &["ember"], vec![first]), deployment("other", &["twin"], vec![second])]);
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    gateway.knows("chat", EndpointState::Serving, 1).await?;
    gateway.knows("other", EndpointState::Serving, 1).await?;
    open(&browser, gateway.base(), &json!({"compare": 1})).await?;
    browser.choose("[data-option=model][data-side=a]", "ember").await?;
    browser.choose("[data-option=model][data-side=b]", "twin").await?;
    ask(&browser, "Who are you?").await?;
    assert_eq!(browser.text(".answer:first-child .who").await?, "A · ember");
    assert_eq!(browser.text(".answer:last-child .who").await?, "B · twin");
    assert_eq!(count(&browser, ".after .note").await?, 0);
    Ok(())
}

/// What a parser of HTML that others wrote finds wrong in a page, read from standard input.
const READ_STRICTLY: &str = "import sys, html5lib
parser = html5lib.HTMLParser()
parser.parse(sys.stdin.read())
for (line, column), code, data in parser.errors:
    print(f'line {line}, column {column}: {html5lib.constants.E[code] % data}')";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_is_valid_html() -> Result<()> {
    let packages = "html5lib==1.1\nsix==1.17.0\nwebencodings==0.6.1\n";
    let python = match tokio::task::spawn_blocking(move || python_with(packages)).await? {
        Ok(python) => python,
        Err(reason) => {
            skip("the_page_is_valid_html", &format!("{reason:#}"));
            return Ok(());
        }
    };
    for (html, is_valid) in
        [(stoker_pages::playground::page("a&b\"/"), true), ("<!DOCTYPE html><p><div></p>".into(), false)]
    {
        let mut reader = Command::new(&python);
        reader.args(["-c", READ_STRICTLY]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut reader = reader.spawn()?;
        reader.stdin.take().context("stdin is a pipe")?.write_all(html.as_bytes())?;
        let output = reader.wait_with_output()?;
        let found = String::from_utf8(output.stdout)?;
        assert!(output.status.success() && found.is_empty() == is_valid, "{found}");
    }
    Ok(())
}

/// One look at the page, and a picture of it.
async fn look(browser: &Browser, test: &str, name: &str) -> Result<()> {
    looks_well(browser, test).await?;
    draw(browser, &format!("playground-{name}")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_kept_out_in_any_theme_or_width() -> Result<()> {
    let test = "nobody_is_kept_out_in_any_theme_or_width";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let agent = AgentProcess::ready(&[]).await?;
    open(&browser, agent.base(), &json!({"a.temperature": "0"})).await?;
    look(&browser, test, "empty").await?;
    ask(&browser, "Who are you?").await?;
    ask(&browser, "Tell me a story about the sea.").await?;
    look(&browser, test, "chat").await?;

    open(
        &browser,
        agent.base(),
        &json!({"compare": 1, "probabilities": 1, "a.temperature": "0.6", "a.seed": "3", "b.temperature": "1.4"}),
    )
    .await?;
    ask(&browser, "Tell me a story about the sea.").await?;
    browser.hover(".token.p3, .token.p4").await?;
    look(&browser, test, "compare").await?;

    let tools = json!([{"type": "function", "function": {"name": "get_weather", "parameters":
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]);
    let form = json!({"tools": format!("{tools:#}"), "tool-choice": "required", "a.temperature": "0"});
    open(&browser, agent.base(), &form).await?;
    ask(&browser, "What is the weather in Oslo?").await?;
    look(&browser, test, "tools").await?;
    browser.click(".answer .tools button:nth-child(4)").await?;
    look(&browser, test, "code").await
}
