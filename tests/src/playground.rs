//! The playground in a browser, whoever serves it: opens it with a form, asks, and uses it as people do.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::browser::{Browser, Key};

/// No answer is on its way, and there is one.
pub const ANSWERED: &str = "document.querySelector('#stop').hidden && !document.querySelector('[aria-busy=true]') && !!document.querySelector('.answer')";
/// A grammar that no model leaves early: stopping has time.
const LONG: &str =
    r#"{"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 400}"#;

/// Opens the page with a form in its address.
pub async fn open(browser: &Browser, base: &str, form: &Value) -> Result<()> {
    // Only the fragment would differ from the page before, which loads nothing.
    browser.open("about:blank").await?;
    let fragment: String = form.to_string().bytes().map(|byte| format!("%{byte:02x}")).collect();
    browser.open(&format!("{}/#{fragment}", base.trim_end_matches('/'))).await?;
    browser.wait_until("models listed", "document.querySelector('[data-option=model]').options.length > 0").await
}

/// Sends a message.
pub async fn send(browser: &Browser, text: &str) -> Result<()> {
    browser.fill("#draft", text).await?;
    browser.press(Key::Enter).await
}

/// Sends a message and waits for the end of every answer; the text of the last.
pub async fn ask(browser: &Browser, text: &str) -> Result<String> {
    send(browser, text).await?;
    browser.wait_until("answered", ANSWERED).await?;
    last_answer(browser).await
}

/// What the last answer says.
pub async fn last_answer(browser: &Browser) -> Result<String> {
    let text = browser.value("[...document.querySelectorAll('.answer .text')].at(-1).textContent").await?;
    Ok(text.as_str().unwrap_or_default().to_owned())
}

/// How many elements there are of a CSS selector.
pub async fn count(browser: &Browser, selector: &str) -> Result<u64> {
    let counted = browser.value(&format!("document.querySelectorAll({}).length", json!(selector))).await?;
    counted.as_u64().context("a count")
}

/// A chat is seen to stream, and is stopped in the middle.
pub async fn a_stream_is_stopped(browser: &Browser, base: &str) -> Result<()> {
    open(browser, base, &json!({"structure": "schema", "schema": LONG})).await?;
    send(browser, "Count").await?;
    browser.wait_until("streaming", "document.querySelector('.answer .text').textContent.length > 8").await?;
    browser.press(Key::Escape).await?;
    browser.wait_until("stopped", ANSWERED).await?;
    assert!(browser.text(".facts-line").await?.contains("stopped by you"));
    assert!(last_answer(browser).await?.starts_with('['), "what was written stays");
    Ok(())
}

/// A tool is called, its call is checked, and its result is sent.
pub async fn a_tool_is_used(browser: &Browser, base: &str) -> Result<()> {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]);
    let form = json!({"tools": tools.to_string(), "tool-choice": "required", "a.temperature": "0"});
    open(browser, base, &form).await?;
    ask(browser, "What is the weather in Oslo?").await?;
    assert_eq!(browser.text(".call pre").await?, "{\n  \"city\": \"Oslo\"\n}");
    assert!(browser.text(".verdict").await?.contains("The call of get_weather fits its schema"));
    browser.fill(".results textarea", "12 degrees, rain").await?;
    browser.click(".results button").await?;
    browser.wait_until("results sent", &format!("document.querySelectorAll('.turn').length === 2 && {ANSWERED}")).await
}

/// An answer fits the schema that it was asked for, and the same words by a person that do not are found out.
pub async fn a_schema_is_used(browser: &Browser, base: &str) -> Result<()> {
    let schema = r#"{"type": "object", "required": ["customer", "quantity"], "additionalProperties": false,
        "properties": {"customer": {"type": "string"}, "quantity": {"type": "integer"}}}"#;
    let form = json!({"structure": "schema", "schema": schema, "a.temperature": "0"});
    open(browser, base, &form).await?;
    ask(browser, "Extract customer and quantity as JSON: Order from Vefe: 17 x vube, 31 euros.").await?;
    assert!(browser.text(".verdict").await?.contains("The answer fits its schema"));
    browser.click(".answer .tools button:nth-child(2)").await?;
    browser.fill(".answer .editor textarea", r#"{"customer": 3}"#).await?;
    browser.press(Key::Enter).await?;
    let says = browser.text(".after .note").await?;
    assert!(says.contains("$.customer is number, not string") && says.contains(r#"$ lacks "quantity""#), "{says}");
    Ok(())
}
