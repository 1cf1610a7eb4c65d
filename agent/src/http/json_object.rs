//! JSON objects member by member: those of a body, each still text inside it, and each name once; and those of values in
//! which clients send more than anybody reads. Understands no member.

use std::{collections::BTreeSet, fmt, marker::PhantomData, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor, value::SeqAccessDeserializer},
};
use serde_json::value::RawValue;

/// Names and values of an object, in the order they were sent.
pub(crate) struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Members<'a> {
    /// The members of `text`, which must be one object.
    pub(crate) fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Each name with the place of its value in the text it was parsed from.
    pub(crate) fn places(self, text: &'a str) -> impl Iterator<Item = (String, Range<usize>)> {
        let begin = text.as_ptr().addr();
        self.0.into_iter().map(move |(name, raw)| {
            let at = raw.get().as_ptr().addr() - begin;
            (name, at..at + raw.get().len())
        })
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut members, mut names) = (Vec::new(), BTreeSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(twice(&name));
            }
            members.push((name, map.next_value()?));
        }
        Ok(Members(members))
    }
}

/// A value in which no object has a name twice. JSON leaves open which of the two would count.
pub(crate) struct NamesOnce;

impl<'de> Deserialize<'de> for NamesOnce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for NamesOnce {
    type Value = Self;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if names.contains(&name) {
                return Err(twice(&name));
            }
            names.insert(name);
            map.next_value::<Self>()?;
        }
        Ok(self)
    }
}

/// A value that takes its members one by one. A derived one would refuse names that it does not know also where nothing is
/// said.
pub(crate) trait Filled: Default {
    /// Takes the value of `name` from `map`, or passes over it.
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Reads an object into a value.
pub(crate) fn filled<'de, T: Filled, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_map(FilledVisitor(PhantomData))
}

/// Passes over a member that nobody reads: `null` says nothing, and what clients are known to echo is no question of theirs.
/// Anything else would be ignored and is refused.
pub(crate) fn pass_over<'de, A: MapAccess<'de>>(map: &mut A, name: &str, echoed: &[&str]) -> Result<(), A::Error> {
    match map.next_value::<Option<IgnoredAny>>()? {
        Some(_) if !echoed.contains(&name) => Err(A::Error::unknown_field(name, &[])),
        _ => Ok(()),
    }
}

/// Notes a member that nobody knows, unless it is `null`: what it is part of says what is wrong with it, once that is known.
pub(crate) fn note_unknown<'de, A: MapAccess<'de>>(
    map: &mut A,
    name: &str,
    unknown: &mut Option<String>,
) -> Result<(), A::Error> {
    if map.next_value::<Option<IgnoredAny>>()?.is_some() {
        *unknown = Some(name.to_owned());
    }
    Ok(())
}

struct FilledVisitor<T>(PhantomData<T>);

impl<'de, T: Filled> Visitor<'de> for FilledVisitor<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut value = T::default();
        while let Some(name) = map.next_key::<String>()? {
            value.fill(&name, &mut map)?;
        }
        Ok(value)
    }
}

/// Reads a text or a list. An untagged enum would lose the path of what is wrong in the list.
pub(crate) fn text_or_list<'de, T, I, D>(
    deserializer: D,
    of_text: fn(String) -> T,
    of_list: fn(Vec<I>) -> T,
    expected: &'static str,
) -> Result<T, D::Error>
where
    I: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_any(TextOrList { of_text, of_list, expected })
}

struct TextOrList<T, I> {
    of_text: fn(String) -> T,
    of_list: fn(Vec<I>) -> T,
    expected: &'static str,
}

impl<'de, T, I: Deserialize<'de>> Visitor<'de> for TextOrList<T, I> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expected)
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok((self.of_text)(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<T, A::Error> {
        Deserialize::deserialize(SeqAccessDeserializer::new(items)).map(self.of_list)
    }
}

/// In the words that serde has for a struct's field.
fn twice<E: Error>(name: &str) -> E {
    E::custom(format_args!("duplicate field `{name}`"))
}
