//! Whether a model fits places, in words: the numbers, and where it does not, the nearest change that is enough. Pure.

use stoker_crds::{conditions, nodes::PRODUCT};
use stoker_fit::plan::{Asked, Fit, Misfit, Model, Place, RemedyText, gib, plan, remedies};
use stoker_replica::Trouble;

use super::{Opinion, candidates::Candidate};

/// An opinion, and the plan that it is from.
#[derive(Clone, Debug)]
pub(super) struct Judged {
    pub(super) opinion: Opinion,
    /// Of the place where least fits.
    pub(super) planned: Option<(String, Fit)>,
}

/// Of places of which there is at least one.
pub(super) fn judge(model: &Model, asked: &Asked, candidates: &[Candidate]) -> Judged {
    let mut fitting = Vec::new();
    let mut misfits = Vec::new();
    let mut proven = Vec::new();
    for candidate in candidates {
        match plan(model, asked, candidate.place) {
            Ok(fit) => fitting.push((candidate, fit)),
            Err(_) if candidate.is_proven => proven.push(candidate),
            Err(misfit) => misfits.push((candidate, misfit)),
        }
    }
    fitting.sort_by_key(|(_, fit)| fit.memory.kv_tokens());
    let good = fitting.first().map(|(candidate, _)| *candidate).or_else(|| proven.first().copied());
    let opinion = match (good, misfits.last()) {
        (_, None) => Opinion { fits: Some(true), trouble: fits(&fitting, &proven), is_hopeless: false },
        (Some(good), Some((bad, misfit))) => {
            let words = does_not(model, asked, bad, misfit);
            let trouble = Trouble::new(conditions::REASON_FITS_SOME_NODES, some(good, &words));
            Opinion { fits: Some(false), trouble, is_hopeless: false }
        }
        (None, Some((bad, misfit))) => {
            let trouble = Trouble::new(conditions::REASON_DOES_NOT_FIT, does_not(model, asked, bad, misfit));
            let is_hopeless = misfits.iter().all(|(place, misfit)| fails_for_sure(model, asked, place, misfit));
            Opinion { fits: Some(false), trouble, is_hopeless }
        }
    };
    let planned = fitting.into_iter().next().map(|(candidate, fit)| (candidate.label.clone(), fit));
    Judged { opinion, planned }
}

fn fits(fitting: &[(&Candidate, Fit)], proven: &[&Candidate]) -> Trouble {
    let Some((candidate, fit)) = fitting.first() else {
        let label = proven.first().map_or("", |candidate| &candidate.label);
        return Trouble::new(
            conditions::REASON_FITS,
            format!("a replica serves on {label}, though by the plan it would not"),
        );
    };
    let all = match fitting.len() + proven.len() {
        1 => "",
        _ => ", the smallest that its pods may land on",
    };
    let memory = &fit.memory;
    let [weights, workspace, limit] = [memory.weights_bytes, memory.workspace_bytes, memory.limit_bytes].map(gib);
    let message = format!(
        "on {}{all}: weights of {weights} and {workspace} for steps, of {limit} that may be used; {}",
        candidate.label,
        fit.in_words()
    );
    Trouble::new(conditions::REASON_FITS, message)
}

fn does_not(model: &Model, asked: &Asked, place: &Candidate, misfit: &Misfit) -> String {
    let remedies = remedies(model, asked, place.place);
    format!("not on {}: {}; {}", place.label, misfit.cause(), RemedyText(&remedies))
}

fn some(good: &Candidate, words: &str) -> String {
    let keep = match &good.product {
        Some(product) => format!(", or pods on nodes with the label {PRODUCT}: {product} (pod.nodeSelector)"),
        None => String::new(),
    };
    format!("fits {}, {words}{keep}", good.label)
}

/// Even if nobody had taken anything of the GPU. What CPUs lack their agent says at no great price.
fn fails_for_sure(model: &Model, asked: &Asked, candidate: &Candidate, misfit: &Misfit) -> bool {
    match (misfit, candidate.place) {
        (Misfit::Refused(_), _) => true,
        (Misfit::Memory(_), Place::Gpu(card)) => plan(model, asked, Place::Gpu(card.at_best())).is_err(),
        (Misfit::Memory(_), Place::Host { .. }) => false,
    }
}
