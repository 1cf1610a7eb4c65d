//! Grammars that meet a limit in the middle of a text.

use super::*;
use crate::constraint::Grammar;

/// Over ember's vocabulary, whose tokens are longer than a byte.
fn compiler() -> (GrammarCompiler, Arc<Tokenizer>) {
    let (tokenizer, eos) = tokenizers().into_iter().nth(1).expect("ember is the second");
    (GrammarCompiler::new(&tokenizer, &eos).unwrap(), tokenizer)
}

/// Writes a text, a token a byte, until it is all there or a limit is met. Returns what might have come at each place.
fn write(matcher: &mut dyn Matcher, tokenizer: &Tokenizer, text: &str) -> Result<Vec<Vec<u32>>, String> {
    let next = |matcher: &mut dyn Matcher| {
        let mut mask = vec![0; mask_words(tokenizer.n_ids())];
        matcher.allow(&mut mask).map(|()| mask)
    };
    let mut masks = Vec::new();
    for c in text.chars() {
        let token = tokenizer.token_id(&c.to_string()).expect("a letter is a token");
        let mask = next(matcher)?;
        assert!(allows(&mask, token), "{c} of {text}");
        matcher.accept(token)?;
        masks.push(mask);
    }
    masks.push(next(matcher)?);
    Ok(masks)
}

/// A text without any of four words, up to a fifth: what is left of each is followed at once. Or letters.
fn without_words() -> GrammarSpec {
    let words = ["<one>", "<two>", "<three>", "<four>"].map(|word| format!(" & ~/(.|\\n)*{word}(.|\\n)*/"));
    let text = format!("TEXT: ANY{}\nANY: /(.|\\n)*/", words.concat());
    GrammarSpec::Lark(format!(
        "start: /[xyz]/ (ended | TEXT) | /[abcd]+/\nended[lazy]: ENDED\nENDED: TEXT /<five>/\n{text}"
    ))
}

/// Steps for a mask of [`without_words`]: the letters take 150 to 200, a text 300 to 400.
const FOR_LETTERS: u64 = 250;

#[test]
fn what_a_text_asks_too_much_of_the_lexer_changes_no_other() {
    let (mut compiler, tokenizer) = compiler();
    compiler.factory.limits_mut().step_lexer_fuel = FOR_LETTERS;
    let parser = compiler.parser(&without_words()).unwrap();
    let alone = Compiled::new(parser, Arc::clone(&compiler.words), Arc::clone(&compiler.memory), 0).unwrap();
    let expected = write(&mut *alone.any_spelling(), &tokenizer, "bcbdbc").unwrap();

    let (constraint, _) = compiler.compile(&without_words()).unwrap();
    let [mut greedy, mut beside, mut untouched] = [(); 3].map(|()| constraint.0.any_spelling());
    let begun = write(&mut *beside, &tokenizer, "bcb").unwrap();
    let reason = write(&mut *greedy, &tokenizer, "xabcdabcdabcd").unwrap_err();
    assert!(reason.contains("more than 250 steps for one token: shorten repetitions"), "{reason}");
    // The lexer that they shared is broken: who is on his way goes on with another, who comes begins with another.
    assert_eq!(begun, expected[..4]);
    assert_eq!(write(&mut *beside, &tokenizer, "dbc").unwrap(), expected[3..]);
    assert_eq!(write(&mut *untouched, &tokenizer, "bcbdbc").unwrap(), expected);
    let (again, source) = compiler.compile(&without_words()).unwrap();
    assert_eq!((again == constraint, source), (true, Source::Cached));
    assert_eq!(write(&mut *again.0.any_spelling(), &tokenizer, "bcbdbc").unwrap(), expected);
    assert!(write(&mut *again.0.matcher(), &tokenizer, "bcbdbc").is_ok());
}

#[test]
fn what_is_looked_at_ahead_ends_no_text_that_llguidance_follows() {
    let (mut compiler, _) = compiler();
    let spec = GrammarSpec::Regex(r#"([a-z]{0,16}[^<]{1,24})?([A-Za-z0-9_-]([^"]{2,25}|a)){0,3}"#.into());
    let has_mask = |compiler: &GrammarCompiler, masks: LexemeMasks| {
        let mut parser = compiler.parser(&spec).unwrap();
        parser.bias_computer = Arc::new(masks);
        parser.start_without_prompt();
        parser.compute_mask().is_ok()
    };
    let is_between = |fuel: &u64| {
        compiler.factory.limits_mut().step_lexer_fuel = *fuel;
        let words = Arc::clone(&compiler.words);
        has_mask(&compiler, LexemeMasks::by_llguidance(&words)) && !has_mask(&compiler, LexemeMasks::learning(&words))
    };
    let fuel = (75..125).map(|n| 200 * n).find(is_between);
    assert!(fuel.is_some() && compiler.compile(&spec).is_ok(), "{fuel:?}");
}

#[test]
fn a_token_is_taken_in_by_whom_another_has_broken_the_lexer_meanwhile() {
    let (mut compiler, tokenizer) = compiler();
    compiler.factory.limits_mut().step_lexer_fuel = FOR_LETTERS;
    let (constraint, _) = compiler.compile(&without_words()).unwrap();
    let mut beside = constraint.0.any_spelling();
    beside.allow(&mut vec![0; mask_words(tokenizer.n_ids())]).unwrap();
    write(&mut *constraint.0.any_spelling(), &tokenizer, "xabcdabcdabcd").unwrap_err();
    beside.accept(tokenizer.token_id("b").unwrap()).unwrap();
    assert!(write(&mut *beside, &tokenizer, "cd").is_ok());
}

#[test]
fn rules_that_can_be_followed_in_too_many_ways_are_refused_or_end_their_text() {
    let (compiler, tokenizer) = compiler();
    let words: Vec<String> = (0..9_000).map(|n| format!("\"{n:x}\"")).collect();
    let rules = |start: &str| GrammarSpec::Lark(format!("start: {start} w+\nw: {}", words.join(" | ")));
    let at_once = compiler.compile(&rules("")).unwrap_err().to_string();
    assert!(at_once.contains("more than 50000 ways for one token: let rules repeat"), "{at_once}");
    let (constraint, _) = compiler.compile(&rules("/[xyz]!/")).unwrap();
    let [mut first, mut second] = [(); 2].map(|()| constraint.0.any_spelling());
    write(&mut *second, &tokenizer, "x").unwrap();
    assert_eq!(write(&mut *first, &tokenizer, "x!").unwrap_err(), at_once);
    assert_eq!(write(&mut *second, &tokenizer, "!").unwrap_err(), at_once, "each by itself");
}

/// Letters of which one far behind decides: a state for each row of letters that can be told apart.
fn far_behind() -> GrammarSpec {
    GrammarSpec::Regex("[ab]*a[ab]{12}".into())
}

/// So many of these letters, one row a seed.
fn letters(seed: u64, n: usize) -> String {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut letter = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        if state >> 60 & 1 == 0 { 'a' } else { 'b' }
    };
    (0..n).map(|_| letter()).collect()
}

/// What one row of 30 letters needs, and not what three do.
const FOR_A_ROW: usize = 300;

#[test]
fn a_text_that_needs_more_states_than_a_lexer_may_have_ends_and_no_other() {
    let (compiler, tokenizer) = compiler();
    assert_eq!(compiler.factory.limits().max_lexer_states, MAX_LEXER_STATES);
    let (unbounded, _) = compiler.compile(&far_behind()).unwrap();
    let expected = write(&mut *unbounded.0.any_spelling(), &tokenizer, &letters(1, 30)).unwrap();

    let (mut compiler, tokenizer) = self::compiler();
    compiler.factory.limits_mut().max_lexer_states = FOR_A_ROW;
    let (constraint, _) = compiler.compile(&far_behind()).unwrap();
    let [mut greedy, mut beside] = [(); 2].map(|()| constraint.0.any_spelling());
    let begun = write(&mut *beside, &tokenizer, &letters(1, 30)[..10]).unwrap();
    let reason = write(&mut *greedy, &tokenizer, &letters(7, 400)).unwrap_err();
    let said =
        "its patterns have more than 300 states: shorten repetitions such as `{0,5000}` and long alternatives in it";
    assert_eq!(reason, said);
    assert_eq!(begun, expected[..11]);
    assert_eq!(write(&mut *beside, &tokenizer, &letters(1, 30)[10..]).unwrap(), expected[10..]);
}

#[test]
fn what_many_texts_need_together_ends_none_of_them() {
    let (mut compiler, tokenizer) = compiler();
    let (unbounded, _) = compiler.compile(&far_behind()).unwrap();
    let rows: Vec<String> = (0..24).map(|seed| letters(seed, 30)).collect();
    let expected = rows.iter().map(|row| write(&mut *unbounded.0.any_spelling(), &tokenizer, row).unwrap());
    let expected: Vec<_> = expected.collect();

    compiler = self::compiler().0;
    compiler.factory.limits_mut().max_lexer_states = FOR_A_ROW;
    let (constraint, _) = compiler.compile(&far_behind()).unwrap();
    // All on their way at once, a letter each in turn.
    let mut ways: Vec<_> = rows.iter().map(|_| (constraint.0.any_spelling(), Vec::new())).collect();
    for at in 0..30 {
        for (row, (way, masks)) in rows.iter().zip(&mut ways) {
            masks.extend(write(&mut **way, &tokenizer, &row[at..=at]).unwrap().into_iter().take(1));
        }
    }
    for ((_, masks), expected) in ways.iter().zip(&expected) {
        assert!(masks[..] == expected[..30]);
    }
    let reason = write(&mut *constraint.0.any_spelling(), &tokenizer, &rows.concat()).unwrap_err();
    assert!(reason.contains("more than 300 states"), "one lexer has not what they need together: {reason}");
}

/// What grammars may hold in these tests.
const FOR_ALL: usize = 8 << 20;

/// `far_behind`, but another one each.
fn hungry(n: usize) -> GrammarSpec {
    GrammarSpec::Regex(format!("[ab]*a[ab]{{{}}}", 30 + n))
}

#[test]
fn what_all_grammars_hold_is_bounded_and_the_large_ones_end_by_name() {
    let (mut compiler, tokenizer) = compiler();
    compiler.memory = Memory::new(FOR_ALL);
    let (small, _) = compiler.compile(&GrammarSpec::Regex("[abcd]+".into())).unwrap();
    let mut small = small.0.matcher();
    let mut hungry: Vec<_> = (0..6).map(|n| compiler.compile(&hungry(n)).unwrap().0.0.any_spelling()).collect();
    let (mut reasons, row) = (Vec::new(), letters(3, 1000));
    for (at, next) in row.char_indices() {
        hungry.retain_mut(|way| match write(&mut **way, &tokenizer, &next.to_string()) {
            Ok(_) => true,
            Err(reason) => {
                reasons.push((at, reason));
                false
            }
        });
        write(&mut *small, &tokenizer, &next.to_string()).expect("it needs little");
        assert!(compiler.memory.held() <= 2 * FOR_ALL, "{} after {at}", compiler.memory.held());
    }
    let said = "the grammars of all requests need more than 8 MiB, and its patterns more than their part of it";
    assert!(!reasons.is_empty() && reasons.iter().all(|(_, reason)| reason.contains(said)), "{reasons:?}");
    assert!(!hungry.is_empty(), "what those who ended held is the others'");
}

#[test]
fn rules_that_are_followed_in_many_ways_at_every_place_end_by_name_too() {
    let (mut compiler, tokenizer) = compiler();
    compiler.memory = Memory::new(FOR_ALL);
    let rules: Vec<String> = (0..1000).map(|n| format!("r{n}: /[ab]/")).collect();
    let names: Vec<String> = (0..1000).map(|n| format!("r{n}")).collect();
    let spec = GrammarSpec::Lark(format!("start: ({})+\n{}", names.join(" | "), rules.join("\n")));
    let (constraint, _) = compiler.compile(&spec).unwrap();
    let reason = write(&mut *constraint.0.any_spelling(), &tokenizer, &letters(3, 3000)).unwrap_err();
    let said = "the grammars of all requests need more than 8 MiB, and its rules more than their part of it";
    assert!(reason.contains(said) && reason.contains("let rules repeat with `*`"), "{reason}");
}

#[test]
fn a_grammar_that_nobody_uses_gives_its_memory_to_the_next() {
    const MAX_BYTES: usize = 4 << 20;
    let (mut compiler, tokenizer) = compiler();
    compiler.memory = Memory::new(MAX_BYTES);
    let (kept, _) = compiler.compile(&GrammarSpec::Regex("[ab]*".into())).unwrap();
    let (large, _) = compiler.compile(&hungry(0)).unwrap();
    let mut way = large.0.any_spelling();
    for next in letters(3, 3000).chars() {
        write(&mut *way, &tokenizer, &next.to_string()).unwrap();
        if compiler.memory.held() > MAX_BYTES * 3 / 4 {
            break;
        }
    }
    drop((way, large));
    assert!(compiler.memory.is_tight());
    compiler.compile(&GrammarSpec::Regex("c".into())).unwrap();
    assert!(!compiler.memory.is_tight(), "{}", compiler.memory.held());
    assert_eq!(compiler.compile(&hungry(0)).unwrap().1, Source::Compiled);
    let (again, source) = compiler.compile(&GrammarSpec::Regex("[ab]*".into())).unwrap();
    assert_eq!((again == kept, source), (true, Source::Cached), "a request has it");
}

#[test]
fn a_grammar_whose_text_is_large_is_refused_by_name_while_others_like_it_are_used() {
    let (mut compiler, _) = compiler();
    compiler.memory = Memory::new(3 * FOR_ALL);
    // 50 KB, which are counted as 10 MB.
    let long = |n: usize| GrammarSpec::Choice((0..4000).map(|i| format!("{n}{i}").repeat(2)).collect());
    let used: Vec<_> = (0..2).map(|n| compiler.compile(&long(n)).unwrap().0).collect();
    let refused = compiler.compile(&long(2)).unwrap_err().to_string();
    let said = ["need more than 24 MiB, and its text more than its part of it, ", ": send a smaller one"];
    assert!(said.iter().all(|part| refused.contains(part)), "{refused}");
    compiler.compile(&GrammarSpec::Regex("[ab]+".into())).unwrap();
    drop(used);
    compiler.compile(&long(2)).unwrap();
}
