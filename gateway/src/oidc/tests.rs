//! Tokens that others made (RFC 7515, 7519, 7520 and 8037, PyJWT; `tests/vectors/tokens.json`), and tokens that somebody would like to be believed.

use ring::{
    hmac,
    signature::{Ed25519KeyPair, KeyPair},
};
use serde_json::{Value, json};

use super::{
    jwks::{Algorithm, JwksError, Verdict},
    token::TOKEN_BYTES_MAX,
    *,
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

const ISSUER: &str = "https://login.example";
const NOW: u64 = 1_800_000_000;

fn vectors() -> Value {
    serde_json::from_str(include_str!("../../tests/vectors/tokens.json")).unwrap()
}

fn keys(keys: &[Value]) -> Keys {
    Keys::parse(json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

fn spec(more: Value) -> IssuerSpec {
    let mut spec = json!({"issuer": ISSUER, "audiences": ["stoker"], "tenantClaim": "sub"});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(spec).unwrap()
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Who signs with Ed25519, by a seed.
struct Signer {
    pair: Ed25519KeyPair,
    kid: &'static str,
}

impl Signer {
    fn new(kid: &'static str, seed: u8) -> Self {
        Self { pair: Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap(), kid }
    }

    fn jwk(&self) -> Value {
        let x = URL_SAFE_NO_PAD.encode(self.pair.public_key());
        json!({"kty": "OKP", "crv": "Ed25519", "x": x, "kid": self.kid, "use": "sig", "alg": "EdDSA"})
    }

    fn sign(&self, header: &Value, claims: &Value) -> String {
        let signed = unsigned(header, claims);
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(self.pair.sign(signed.as_bytes())))
    }

    fn token(&self, claims: &Value) -> String {
        self.sign(&json!({"alg": "EdDSA", "kid": self.kid, "typ": "JWT"}), claims)
    }
}

fn unsigned(header: &Value, claims: &Value) -> String {
    [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string())).join(".")
}

fn claims(more: Value) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": "stoker", "sub": "search", "exp": NOW + 60});
    for (name, value) in more.as_object().unwrap() {
        match value {
            Value::Null => _ = claims.as_object_mut().unwrap().remove(name),
            value => claims[name] = value.clone(),
        }
    }
    claims
}

fn judged(token: &str, spec: &IssuerSpec, keys: &Keys, now_s: u64) -> Result<Identity, TokenError> {
    Unverified::read(token.as_bytes())?.verified(spec, keys, now_s)
}

#[test]
fn what_rfcs_sign_is_signed_and_by_no_other_algorithm_nor_when_a_bit_is_different() {
    for vector in vectors()["rfcs"]["signed"].as_array().unwrap() {
        let (from, token) = (word(&vector["from"]), word(&vector["token"]));
        let (message, signature) = token.rsplit_once('.').unwrap();
        let mut signature = URL_SAFE_NO_PAD.decode(signature).unwrap();
        let keys = keys(std::slice::from_ref(&vector["key"]));
        let kid = vector["key"]["kid"].as_str();
        let own = Algorithm::named(word(&vector["alg"])).unwrap();
        let verdict = |algorithm, signature: &[u8]| keys.verdict(algorithm, kid, message.as_bytes(), signature);
        assert_eq!(verdict(own, &signature), Verdict::Signed, "{from}");
        for other in Algorithm::ALL.into_iter().filter(|other| *other != own) {
            assert_ne!(verdict(other, &signature), Verdict::Signed, "{from} by {other:?}");
        }
        signature[7] ^= 1;
        assert_ne!(verdict(own, &signature), Verdict::Signed, "{from} with a wrong bit");
    }
}

#[test]
fn what_rfcs_do_not_sign_or_sign_with_a_secret_is_not_believed() {
    let some = keys(&[vectors()["rfcs"]["signed"][0]["key"].clone()]);
    for vector in vectors()["rfcs"]["refused"].as_array().unwrap() {
        let error = judged(word(&vector["token"]), &spec(json!({"issuer": "joe"})), &some, NOW).unwrap_err();
        let expected = match word(&vector["error"]) {
            "algorithm" => matches!(error, TokenError::Algorithm(_)),
            "claims" => error == TokenError::Malformed("claims"),
            "parts" => error == TokenError::Malformed("three parts"),
            other => panic!("{other}"),
        };
        assert!(expected, "{}: {error:?}", vector["from"]);
    }
}

#[test]
fn what_pyjwt_signs_is_believed_where_its_algorithm_is_accepted() {
    let pyjwt = &vectors()["pyjwt"];
    let all = keys(pyjwt["jwks"]["keys"].as_array().unwrap());
    let tokens = pyjwt["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), Algorithm::ALL.len());
    for vector in tokens {
        let (alg, token) = (word(&vector["alg"]), word(&vector["token"]));
        let identity = judged(token, &spec(json!({"algorithms": [alg]})), &all, NOW).unwrap();
        assert_eq!((identity.tenant.as_str(), identity.until_s), ("search", 2_000_000_060), "{alg}");
        let others: Vec<&Value> =
            tokens.iter().map(|vector| &vector["alg"]).filter(|other| other.as_str() != Some(alg)).collect();
        let error = judged(token, &spec(json!({ "algorithms": others })), &all, NOW).unwrap_err();
        assert!(matches!(error, TokenError::Algorithm(_)), "{alg}: {error}");
    }
}

#[test]
fn a_public_key_is_no_secret_and_a_token_does_not_choose_its_key_s_kind() {
    let pyjwt = &vectors()["pyjwt"];
    let all = pyjwt["jwks"]["keys"].as_array().unwrap();
    let known = keys(all);
    for jwk in all {
        let kid = word(&jwk["kid"]);
        // What somebody might take for the secret: what is published of the key, as it is written and as bytes.
        let published = jwk["n"].as_str().or(jwk["x"].as_str()).unwrap();
        for secret in [published.as_bytes().to_vec(), URL_SAFE_NO_PAD.decode(published).unwrap()] {
            let signed = unsigned(&json!({"alg": "HS256", "kid": kid}), &claims(json!({})));
            let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &secret), signed.as_bytes());
            let error = judged(&format!("{signed}.{}", URL_SAFE_NO_PAD.encode(tag)), &spec(json!({})), &known, NOW);
            assert!(matches!(error, Err(TokenError::Algorithm(_))), "{kid}: {error:?}");
        }
    }
    let signer = Signer::new("a", 1);
    let known = keys(&[all[0].clone(), signer.jwk()]);
    for (header, expected) in [
        (json!({"alg": "none", "kid": "a"}), None),
        (json!({"alg": "None", "kid": "a"}), None),
        (json!({"alg": "eddsa", "kid": "a"}), None),
        (json!({"alg": "", "kid": "a"}), None),
        (json!({"alg": "RS256", "kid": "a"}), Some(TokenError::UnknownKey)),
        (json!({"alg": "ES256", "kid": "a"}), Some(TokenError::UnknownKey)),
        (json!({"alg": "RS256", "kid": "RS"}), Some(TokenError::Signature)),
        (json!({"alg": "EdDSA", "kid": "RS"}), Some(TokenError::UnknownKey)),
        (json!({"alg": "EdDSA", "kid": "b"}), Some(TokenError::UnknownKey)),
        (json!({"alg": "EdDSA", "kid": "a", "crit": ["exp"]}), Some(TokenError::Critical)),
        (json!({"alg": "EdDSA", "kid": 7}), Some(TokenError::Malformed("header"))),
        (json!({"kid": "a"}), Some(TokenError::Malformed("header"))),
        // What a token brings along proves nothing.
        (
            json!({"alg": "EdDSA", "kid": "b", "jwk": signer.jwk(), "jku": "https://else.example"}),
            Some(TokenError::UnknownKey),
        ),
    ] {
        let error = judged(&signer.sign(&header, &claims(json!({}))), &spec(json!({})), &known, NOW).unwrap_err();
        match expected {
            Some(expected) => assert_eq!(error, expected, "{header}"),
            None => assert!(matches!(error, TokenError::Algorithm(_)), "{header}: {error}"),
        }
    }
    let without_kid = signer.sign(&json!({"alg": "EdDSA"}), &claims(json!({})));
    assert!(judged(&without_kid, &spec(json!({})), &known, NOW).is_ok(), "the only one that fits");
    let of_another = Signer::new("c", 2).sign(&json!({"alg": "EdDSA"}), &claims(json!({})));
    assert_eq!(judged(&of_another, &spec(json!({})), &known, NOW), Err(TokenError::UnknownKey), "it may be new");
}

#[test]
fn claims_are_for_us_now_and_name_somebody() {
    let signer = Signer::new("a", 1);
    let known = keys(&[signer.jwk()]);
    let claim = |name: &str| Some(TokenError::Claim(format!("`{name}`")));
    let (issuer, audience) = (Some(TokenError::Issuer), Some(TokenError::Audience("stoker".into())));
    for (more, expected) in [
        (json!({}), None),
        (json!({"aud": ["other", "stoker"]}), None),
        (json!({"aud": ["other"]}), audience.clone()),
        (json!({"aud": "stoker2"}), audience.clone()),
        (json!({"aud": [["stoker"]]}), audience.clone()),
        (json!({"aud": null}), audience),
        (json!({"iss": "https://login.example/"}), issuer.clone()),
        (json!({"iss": [ISSUER]}), issuer.clone()),
        (json!({"iss": null}), issuer),
        (json!({"exp": null}), claim("exp")),
        (json!({"exp": (NOW + 60).to_string()}), claim("exp")),
        (json!({"exp": -1}), claim("exp")),
        (json!({"exp": 1e300}), None),
        (json!({"exp": NOW as f64 + 0.5}), None),
        // 60 s of leeway: the last second, and the first that is none.
        (json!({"exp": NOW - 59}), None),
        (json!({"exp": NOW - 60}), Some(TokenError::Expired)),
        (json!({"exp": 0}), Some(TokenError::Expired)),
        (json!({"nbf": NOW + 60}), None),
        (json!({"nbf": NOW + 61}), Some(TokenError::NotYet)),
        (json!({"nbf": "later"}), claim("nbf")),
        (json!({"sub": null}), claim("sub")),
        (json!({"sub": 7}), claim("sub")),
    ] {
        let found = judged(&signer.token(&claims(more.clone())), &spec(json!({})), &known, NOW);
        assert_eq!(found.err(), expected, "{more}");
    }
    let nested = claims(json!({"realm": {"team": "a"}, "tier": "gold"}));
    let of = json!({"tenantClaim": "/realm/team", "tenantPrefix": "corp-", "classClaim": "tier", "leewaySeconds": 0});
    let found = judged(&signer.token(&nested), &spec(of), &known, NOW).unwrap();
    assert_eq!(found, Identity { tenant: "corp-a".into(), class: Some("gold".into()), until_s: NOW + 60 });
    for path in ["/realm", "/realm/team/x", "/realm/", "/", "realm/team"] {
        let error = judged(&signer.token(&nested), &spec(json!({ "tenantClaim": path })), &known, NOW);
        assert!(matches!(error, Err(TokenError::Claim(_))), "{path}: {error:?}");
    }
}

#[test]
fn no_byte_of_a_token_can_be_another_and_junk_is_refused() {
    let signer = Signer::new("a", 1);
    let (known, spec) = (keys(&[signer.jwk()]), spec(json!({})));
    let good = signer.token(&claims(json!({})));
    assert!(judged(&good, &spec, &known, NOW).is_ok());
    for at in 0..good.len() {
        for other in *b"Az9-_.= \n\0\xff" {
            let mut changed = good.clone().into_bytes();
            if std::mem::replace(&mut changed[at], other) == other {
                continue;
            }
            let believed = Unverified::read(&changed).and_then(|read| read.verified(&spec, &known, NOW));
            assert!(believed.is_err(), "{at}: {other}");
        }
        assert!(judged(&good[..at], &spec, &known, NOW).is_err(), "cut at {at}");
    }
    let long = signer.token(&claims(json!({"more": "x".repeat(TOKEN_BYTES_MAX)})));
    assert_eq!(judged(&long, &spec, &known, NOW), Err(TokenError::TooLong));
    let [header, body, signature] = good.split('.').collect::<Vec<_>>().try_into().unwrap();
    let (list, deep) = (URL_SAFE_NO_PAD.encode("[]"), URL_SAFE_NO_PAD.encode("[".repeat(5000)));
    let twice = URL_SAFE_NO_PAD.encode(r#"{"alg":"EdDSA","alg":"none"}"#);
    for (junk, part) in [
        (String::new(), "three parts"),
        ("..".to_owned(), "header"),
        (format!("{good}."), "three parts"),
        (format!("{header}.{body}.!"), "signature"),
        (format!("{header}.{body}.{signature}="), "signature"),
        (format!("{list}.{body}.{signature}"), "header"),
        (format!("{twice}.{body}.{signature}"), "header"),
        (format!("{deep}.{body}.{signature}"), "header"),
        (format!("{header}.{list}.{signature}"), "claims"),
        (format!("{header}.{deep}.{signature}"), "claims"),
        (format!("{header}..{signature}"), "claims"),
    ] {
        assert_eq!(judged(&junk, &spec, &known, NOW), Err(TokenError::Malformed(part)), "{junk:.60}");
    }
}

#[test]
fn keys_that_cannot_be_used_are_passed_over() {
    let good = Signer::new("a", 1).jwk();
    let with = |name: &str, value: Value| {
        let mut key = good.clone();
        key[name] = value;
        key
    };
    let unusable = [
        json!({"kty": "oct", "k": "c2VjcmV0", "kid": "a"}),
        json!({"kty": "new", "kid": "a"}),
        json!({}),
        json!(7),
        with("use", json!("enc")),
        with("alg", json!("HS256")),
        with("crv", json!("X25519")),
        with("x", json!("=")),
        json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}),
    ];
    for key in &unusable {
        let set = json!({ "keys": [key] }).to_string();
        assert_eq!(Keys::parse(set.as_bytes()), Err(JwksError::NoneOfUse(1)), "{key}");
    }
    assert_eq!(keys(&[&unusable[..], std::slice::from_ref(&good)].concat()), keys(std::slice::from_ref(&good)));
    assert!(matches!(Keys::parse(b"{}"), Err(JwksError::Form(_))));
    assert_eq!(Keys::parse(json!({"keys": vec![good; 65]}).to_string().as_bytes()), Err(JwksError::TooMany(65)));
}

fn at(unix_s: u64) -> Now {
    Now { unix_s, instant: Instant::now() }
}

fn issuers(specs: Vec<IssuerSpec>) -> Issuers {
    Issuers { known: specs.into_iter().map(|spec| Arc::new(Issuer::new(spec))).collect(), ..Issuers::default() }
}

#[tokio::test]
async fn a_token_costs_one_signature_until_it_expires_or_its_issuer_has_other_keys() {
    let (signer, next) = (Signer::new("a", 1), Signer::new("b", 2));
    let all = issuers(vec![spec(json!({"issuer": "https://other.example"})), spec(json!({}))]);
    all.known[1].learn(Some(keys(&[signer.jwk()])));
    // Nobody would answer.
    all.known.iter().for_each(|issuer| issuer.questions().spent = QUESTIONS_MAX);
    let token = signer.token(&claims(json!({})));
    let ask =
        async |token: &str, now_s| all.identify(token.as_bytes(), at(now_s)).await.map(|known| known.is_remembered);
    assert_eq!(ask(&token, NOW).await, Ok(false));
    assert_eq!(ask(&token, NOW + 119).await, Ok(true));
    assert_eq!(ask(&token, NOW + 120).await, Err(Refused::Token(TokenError::Expired)));
    assert_eq!(ask(&token, NOW).await, Ok(false), "it was forgotten");

    all.known[1].learn(None);
    assert_eq!(ask(&token, NOW).await, Ok(true), "its issuer is away");
    all.known[1].learn(Some(keys(&[signer.jwk()])));
    assert_eq!(ask(&token, NOW).await, Ok(true), "nothing is new");
    all.known[1].learn(Some(keys(&[signer.jwk(), next.jwk()])));
    assert_eq!(ask(&token, NOW).await, Ok(false));
    all.known[1].learn(Some(keys(&[next.jwk()])));
    assert_eq!(ask(&token, NOW).await, Err(Refused::Token(TokenError::UnknownKey)), "its key was taken back");

    let foreign = signer.token(&claims(json!({"iss": "https://third.example"})));
    assert_eq!(ask(&foreign, NOW).await, Err(Refused::Token(TokenError::Issuer)));
    let told = TokenError::Issuer.to_string();
    assert!(!told.contains("example"), "who is accepted is not told to strangers: {told}");
    let other = next.token(&claims(json!({"iss": "https://other.example"})));
    all.known[0].learn(None);
    assert_eq!(ask(&other, NOW).await, Err(Refused::NoKeys("https://other.example".into())), "another's key");
}

#[tokio::test]
async fn a_key_that_is_not_known_is_asked_for_once_and_waited_for() {
    let signer = Signer::new("a", 1);
    let all = issuers(vec![spec(json!({}))]);
    let issuer = Arc::clone(&all.known[0]);
    let answers = async {
        issuer.wanted.notified().await;
        issuer.learn(Some(keys(&[signer.jwk()])));
    };
    let token = signer.token(&claims(json!({})));
    let (found, ()) = tokio::join!(all.identify(token.as_bytes(), at(NOW)), answers);
    assert_eq!(found.map(|known| known.identity.tenant), Ok("search".into()));
    let unknown = Signer::new("b", 2).token(&claims(json!({})));
    issuer.questions().spent = QUESTIONS_MAX;
    let found = all.identify(unknown.as_bytes(), at(NOW)).await;
    assert_eq!(found, Err(Refused::Token(TokenError::UnknownKey)), "at once: enough was asked");
}

#[tokio::test]
async fn a_key_that_was_changed_under_its_name_is_asked_for_and_forgeries_cause_few_questions() {
    let (old, new) = (Signer::new("a", 1), Signer::new("a", 2));
    let all = issuers(vec![spec(json!({}))]);
    let issuer = Arc::clone(&all.known[0]);
    issuer.learn(Some(keys(&[old.jwk()])));
    let n_asked = std::sync::atomic::AtomicU32::new(0);
    let asked = || n_asked.load(std::sync::atomic::Ordering::Relaxed);
    let answers = async {
        loop {
            issuer.wanted.notified().await;
            n_asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            issuer.learn(Some(keys(&[new.jwk()])));
        }
    };
    let begun = Instant::now();
    let asks = async {
        let ask = async |token: String, seconds| {
            let now = Now { unix_s: NOW, instant: begun + Duration::from_secs(seconds) };
            all.identify(token.as_bytes(), now).await.map(|known| known.is_remembered)
        };
        let signature = Err(Refused::Token(TokenError::Signature));
        assert_eq!(
            ask(new.token(&claims(json!({}))), 0).await,
            Ok(false),
            "its issuer signs by another key of this name"
        );
        assert_eq!(asked(), 1);
        assert_eq!(ask(old.token(&claims(json!({}))), 0).await, signature, "and no more by the old one");
        for (seconds, questions) in
            [(0, QUESTIONS_MAX), (9, QUESTIONS_MAX), (10, QUESTIONS_MAX + 1), (29, QUESTIONS_MAX + 2)]
        {
            for seed in 10..40 {
                assert_eq!(ask(Signer::new("a", seed).token(&claims(json!({}))), seconds).await, signature);
            }
            assert_eq!(asked(), questions, "after {seconds} s");
        }
        assert_eq!(ask(new.token(&claims(json!({}))), 29).await, Ok(true), "whom it knows, it does not ask about");
    };
    tokio::select! {
        () = asks => {}
        () = answers => unreachable!("it answers for ever"),
    }
}

#[test]
fn tokens_cause_some_questions_and_one_more_each_ten_seconds() {
    let begun = Instant::now();
    let mut questions = Questions { spent: 0, since: begun, is_asked: false };
    let mut ask = |after: Duration, answered: bool| {
        questions.is_asked &= !answered;
        questions.take(begun + after)
    };
    let second = Duration::from_secs(1);
    assert_eq!(ask(100 * second, true), (true, true));
    assert_eq!(ask(100 * second, false), (true, false), "the same answer");
    assert!((1..QUESTIONS_MAX).all(|_| ask(101 * second, true) == (true, true)));
    assert_eq!([ask(101 * second, true), ask(109 * second, true)], [(false, false); 2]);
    assert_eq!([ask(110 * second, true), ask(119 * second, true)], [(true, true), (false, false)]);
    assert_eq!(
        [ask(130 * second, true), ask(130 * second, true), ask(130 * second, true)],
        [(true, true), (true, true), (false, false)]
    );
}

#[test]
fn what_is_remembered_is_bounded() {
    let all = Issuers::default();
    let remembered = |until_s| {
        let identity = Identity { tenant: "a".into(), class: None, until_s };
        Remembered { identity, place: 0, version: 0 }
    };
    let mut n = 0_u32;
    let mut add = |until_s| {
        let mut hash = [0; 32];
        n += 1;
        hash[..4].copy_from_slice(&n.to_le_bytes());
        all.remember(hash, remembered(until_s), NOW);
        all.lock().len()
    };
    let most = (0..REMEMBERED_MAX).map(|at| add(if at % 2 == 0 { NOW } else { NOW + 1 })).max();
    assert_eq!(most, Some(REMEMBERED_MAX));
    assert_eq!(add(NOW + 1), REMEMBERED_MAX / 2 + 1, "those that expired go first");
    assert!((0..2 * REMEMBERED_MAX).all(|_| add(NOW + 1) <= REMEMBERED_MAX));
}
