//! What a proxy is told, as values: where a request goes, that a part may pass, that a request is refused. And what it said, read.
//! Pure.

use std::collections::BTreeMap;

use axum::http::{self, HeaderMap, HeaderName, HeaderValue, StatusCode, header::HOST, request::Parts};
use bytes::Bytes;
use prost_types::{Struct, Value, value::Kind};

use super::messages::{
    Answer, BodyMutation, BodySendMode, CommonResponse, HeaderAppendAction, HeaderMutation, HeaderValueOption,
    HttpHeaders, HttpStatus, ImmediateResponse, Metadata, ProcessingResponse, StreamedBodyResponse, Told,
};
use crate::{
    error::{Dialect, GatewayError},
    headers::{Changes, REQUEST_ID},
};

/// Where a request goes, as `IP:PORT`; the header and the note have the same name and value.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Of the note.
pub const DESTINATION_NAMESPACE: &str = "envoy.lb";
/// Endpoints that alone may be picked, if it is there.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Of that note.
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";

/// Larger pieces than this are not to be sent back: proxies bound what they take at a time.
const PIECE_BYTES: usize = 62 << 10;

/// The head of a request as this gateway reads its own; `None`: it is none.
pub fn request_parts(head: &HttpHeaders) -> Option<Parts> {
    let mut request = http::Request::builder();
    for header in head.headers.iter().flat_map(|map| &map.headers) {
        let value = bytes_of(header);
        request = match header.key.as_str() {
            ":method" => request.method(&*value),
            ":path" => request.uri(&*value),
            ":authority" => request.header(HOST, &*value),
            pseudo if pseudo.starts_with(':') => request,
            name => request.header(name, &*value),
        };
    }
    Some(request.body(()).ok()?.into_parts().0)
}

/// The status of an answer's head, and its headers.
pub fn response_head(head: &HttpHeaders) -> Option<(StatusCode, HeaderMap)> {
    let (mut status, mut headers) = (None, HeaderMap::new());
    for header in head.headers.iter().flat_map(|map| &map.headers) {
        let value = bytes_of(header);
        if header.key == ":status" {
            status = StatusCode::from_bytes(&value).ok();
        } else if let (Ok(name), Ok(value)) = (header.key.parse::<HeaderName>(), HeaderValue::from_maybe_shared(value))
        {
            headers.append(name, value);
        }
    }
    Some((status?, headers))
}

fn bytes_of(header: &super::messages::HeaderValue) -> Bytes {
    match header.raw_value.is_empty() {
        true => Bytes::copy_from_slice(header.value.as_bytes()),
        false => header.raw_value.clone(),
    }
}

/// Endpoints that alone may be picked; `None`: any. What cannot be read names nobody.
pub fn subset(metadata: Option<&Metadata>) -> Option<Vec<String>> {
    let hint = metadata?.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?;
    let Some(Kind::ListValue(list)) = &hint.kind else { return Some(Vec::new()) };
    let named = list.values.iter().filter_map(|value| match &value.kind {
        Some(Kind::StringValue(endpoint)) => Some(endpoint.clone()),
        _ => None,
    });
    Some(named.collect())
}

/// Where a request goes, and what is changed of its head: what is told of the part that it is told with.
pub fn destination(of: fn(Answer) -> Told, address: &str, changes: &Changes) -> ProcessingResponse {
    let mut set: Vec<HeaderValueOption> =
        changes.set.iter().map(|(name, value)| set_to(name.as_str(), value)).collect();
    if let Ok(value) = HeaderValue::from_str(address) {
        set.push(set_to(DESTINATION, &value));
    }
    let removed = changes.removed.iter().map(|name| name.as_str().to_owned()).collect();
    let mutation = HeaderMutation { set_headers: set, remove_headers: removed };
    let response =
        CommonResponse { header_mutation: Some(mutation), clear_route_cache: true, ..CommonResponse::default() };
    let noted = of_one(DESTINATION, Kind::StringValue(address.to_owned()));
    ProcessingResponse {
        told: Some(of(Answer { response: Some(response) })),
        dynamic_metadata: Some(of_one(DESTINATION_NAMESPACE, Kind::StructValue(noted))),
    }
}

fn of_one(name: &str, kind: Kind) -> Struct {
    Struct { fields: BTreeMap::from([(name.to_owned(), Value { kind: Some(kind) })]) }
}

fn set_to(name: &str, value: &HeaderValue) -> HeaderValueOption {
    let raw_value = Bytes::copy_from_slice(value.as_bytes());
    HeaderValueOption {
        header: Some(super::messages::HeaderValue { key: name.to_owned(), value: String::new(), raw_value }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

/// A part passes as it is.
pub fn pass(told: Told) -> ProcessingResponse {
    ProcessingResponse { told: Some(told), dynamic_metadata: None }
}

/// A head passes with one header more.
pub fn pass_with(of: fn(Answer) -> Told, name: &HeaderName, value: &HeaderValue) -> ProcessingResponse {
    let mutation = HeaderMutation { set_headers: vec![set_to(name.as_str(), value)], ..HeaderMutation::default() };
    let response = CommonResponse { header_mutation: Some(mutation), ..CommonResponse::default() };
    pass(of(Answer { response: Some(response) }))
}

/// A part of a body passes: sent back where the mode is full duplex, else only let go.
pub fn pass_body(of: fn(Answer) -> Told, mode: BodySendMode, part: Bytes, ends: bool) -> Vec<ProcessingResponse> {
    if mode != BodySendMode::FullDuplexStreamed {
        return vec![pass(of(Answer::default()))];
    }
    let piece = |body, end_of_stream| {
        let streamed_response = Some(StreamedBodyResponse { body, end_of_stream });
        let response =
            CommonResponse { body_mutation: Some(BodyMutation { streamed_response }), ..CommonResponse::default() };
        pass(of(Answer { response: Some(response) }))
    };
    let (mut rest, mut pieces) = (part, Vec::new());
    while rest.len() > PIECE_BYTES {
        pieces.push(piece(rest.split_to(PIECE_BYTES), false));
    }
    pieces.push(piece(rest, ends));
    pieces
}

/// A request goes nowhere: what its client is told.
pub fn refuse(error: &GatewayError, dialect: Dialect, id: &HeaderValue) -> ProcessingResponse {
    let mut headers = error.headers();
    headers.insert(REQUEST_ID, id.clone());
    let set_headers = headers.iter().map(|(name, value)| set_to(name.as_str(), value)).collect();
    let refusal = ImmediateResponse {
        status: Some(HttpStatus { code: error.status.as_u16().into() }),
        headers: Some(HeaderMutation { set_headers, ..HeaderMutation::default() }),
        body: error.text(dialect).into(),
        details: error.code.to_owned(),
    };
    pass(Told::Immediate(refusal))
}

#[cfg(test)]
mod tests {
    use prost_types::ListValue;

    use super::{
        super::messages::{self, HttpBody, ProcessingRequest, Said},
        *,
    };

    fn head(pairs: &[(&str, &str)]) -> HttpHeaders {
        let header = |(key, value): &(&str, &str)| messages::HeaderValue {
            key: (*key).to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value.as_bytes()),
        };
        let headers = Some(messages::HeaderMap { headers: pairs.iter().map(header).collect() });
        HttpHeaders { headers, end_of_stream: false }
    }

    #[test]
    fn a_head_is_read_as_one_that_came_over_a_connection() {
        let said = [
            (":method", "POST"),
            (":path", "/v1/x?y"),
            (":authority", "chat.team"),
            (":scheme", "http"),
            ("a", "\u{e9}"),
        ];
        let parts = request_parts(&head(&said)).unwrap();
        assert_eq!((parts.method.as_str(), parts.uri.path(), parts.uri.query()), ("POST", "/v1/x", Some("y")));
        assert_eq!(
            (parts.headers[HOST].as_bytes(), parts.headers["a"].as_bytes()),
            (&b"chat.team"[..], "\u{e9}".as_bytes())
        );
        assert_eq!(parts.headers.len(), 2);
        for wrong in [("a b", "c"), (":path", "no path"), ("a", "b\r\nc: d")] {
            assert!(request_parts(&head(&[wrong])).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn a_hint_that_cannot_be_read_names_nobody() {
        let of = |kind| Metadata { filter_metadata: [(SUBSET_NAMESPACE.to_owned(), of_one(SUBSET, kind))].into() };
        let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        let list = |values| Kind::ListValue(ListValue { values });
        assert_eq!(subset(None), None);
        assert_eq!(subset(Some(&Metadata::default())), None);
        assert_eq!(subset(Some(&of(list(vec![])))), Some(vec![]));
        assert_eq!(subset(Some(&of(list(vec![text("10.0.0.1:8000")])))), Some(vec!["10.0.0.1:8000".to_owned()]));
        assert_eq!(subset(Some(&of(Kind::BoolValue(true)))), Some(vec![]));
    }

    #[test]
    fn a_body_goes_back_in_pieces_that_are_all_of_it_and_end_once() {
        let body = Bytes::from(vec![7; 2 * PIECE_BYTES + 1]);
        for ends in [true, false] {
            let told = pass_body(Told::RequestBody, BodySendMode::FullDuplexStreamed, body.clone(), ends);
            let pieces: Vec<StreamedBodyResponse> = told
                .into_iter()
                .map(|told| match told.told {
                    Some(Told::RequestBody(answer)) => {
                        answer.response.unwrap().body_mutation.unwrap().streamed_response.unwrap()
                    }
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(pieces.iter().map(|piece| piece.body.len()).sum::<usize>(), body.len());
            let marked: Vec<bool> = pieces.iter().map(|piece| piece.end_of_stream).collect();
            assert_eq!(marked, [false, false, ends]);
        }
        assert_eq!(pass_body(Told::RequestBody, BodySendMode::Buffered, body, true).len(), 1);
    }

    #[test]
    fn messages_are_what_the_published_numbers_say() {
        use prost::Message;
        // Field 4 of ProcessingRequest, of length 6: HttpBody with `ab` in field 1 and true in field 2.
        let said = [0x22, 6, 0x0a, 2, b'a', b'b', 0x10, 1];
        let body = HttpBody { body: Bytes::from_static(b"ab"), end_of_stream: true };
        let request = ProcessingRequest { said: Some(Said::RequestBody(body)), ..ProcessingRequest::default() };
        assert_eq!((request.encode_to_vec(), ProcessingRequest::decode(&said[..])), (said.to_vec(), Ok(request)));
        // Field 7 of ProcessingResponse, of length 8: ImmediateResponse with the status 503 in field 1 and a body in field 3.
        let refusal = ImmediateResponse {
            status: Some(HttpStatus { code: 503 }),
            body: Bytes::from_static(b"x"),
            ..ImmediateResponse::default()
        };
        let told = pass(Told::Immediate(refusal)).encode_to_vec();
        assert_eq!(told, [0x3a, 8, 0x0a, 3, 8, 0xf7, 3, 0x1a, 1, b'x']);
    }
}
