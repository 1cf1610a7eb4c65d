//! Least squares whose solution has nothing below zero, exactly: with so few unknowns, every choice of those that are zero is tried.
//! Going down coordinate by coordinate instead would stop half way where two kinds of work nearly always come together, as
//! sequences and their contexts do. Plain numbers.

use crate::cost::KINDS;

/// What is left of an unknown's own square once those before it are explained, below which it is the same as they are.
const INDEPENDENT_MIN: f64 = 1e-12;

type Row = [f64; KINDS];

/// The `c >= 0` at which `c P c - 2 c s` is least; `None` where no choice of unknowns can be told apart. An unknown that was never
/// there (its square is zero) is zero.
pub(crate) fn least_squares(products: &[Row; KINDS], sums: &Row) -> Option<Row> {
    let scale: Row = std::array::from_fn(|kind| products[kind][kind].max(0.0).sqrt());
    let choices =
        (1..1u32 << KINDS).map(|choice| -> [bool; KINDS] { std::array::from_fn(|kind| choice >> kind & 1 == 1) });
    let are_there = |chosen: &[bool; KINDS]| (0..KINDS).all(|kind| !chosen[kind] || scale[kind] > 0.0);
    let solutions = choices.filter(are_there).filter_map(|chosen| solve(products, sums, &scale, &chosen));
    let sound = solutions.filter(|costs| costs.iter().all(|cost| cost.is_finite() && *cost >= 0.0));
    // At a solution `c P c = c s`, so what is least is `- c s`.
    let explained = |costs: &Row| costs.iter().zip(sums).map(|(cost, sum)| cost * sum).sum::<f64>();
    sound.max_by(|a, b| explained(a).total_cmp(&explained(b)))
}

/// The minimum over the chosen unknowns alone (Cholesky); `None` where one of them is a sum of others.
fn solve(products: &[Row; KINDS], sums: &Row, scale: &Row, chosen: &[bool; KINDS]) -> Option<Row> {
    let mut root = [[0.0; KINDS]; KINDS];
    let mut forward = [0.0; KINDS];
    for row in (0..KINDS).filter(|row| chosen[*row]) {
        for column in (0..=row).filter(|column| chosen[*column]) {
            // In units in which each unknown's square is one: seconds a step and seconds a pair are nine orders apart.
            let scaled = products[row][column] / (scale[row] * scale[column]);
            let rest = scaled - (0..column).map(|kind| root[row][kind] * root[column][kind]).sum::<f64>();
            if row == column {
                if rest < INDEPENDENT_MIN {
                    return None;
                }
                root[row][row] = rest.sqrt();
            } else {
                root[row][column] = rest / root[column][column];
            }
        }
        let known: f64 = (0..row).map(|kind| root[row][kind] * forward[kind]).sum();
        forward[row] = (sums[row] / scale[row] - known) / root[row][row];
    }
    let mut costs = [0.0; KINDS];
    for row in (0..KINDS).rev().filter(|row| chosen[*row]) {
        let known: f64 = (row + 1..KINDS).map(|kind| root[kind][row] * costs[kind]).sum();
        costs[row] = (forward[row] - known) / root[row][row];
    }
    Some(std::array::from_fn(|kind| if chosen[kind] { costs[kind] / scale[kind] } else { 0.0 }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn equations(rows: &[Row], seconds: impl Fn(&Row) -> f64) -> ([Row; KINDS], Row) {
        let (mut products, mut sums) = ([[0.0; KINDS]; KINDS], [0.0; KINDS]);
        for row in rows {
            for kind in 0..KINDS {
                (0..KINDS).for_each(|other| products[kind][other] += row[kind] * row[other]);
                sums[kind] += row[kind] * seconds(row);
            }
        }
        (products, sums)
    }

    fn dot(a: &Row, b: &Row) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    fn value(products: &[Row; KINDS], sums: &Row, costs: &Row) -> f64 {
        let square: f64 = products.iter().zip(costs).map(|(row, cost)| cost * dot(row, costs)).sum();
        square - 2.0 * dot(costs, sums)
    }

    /// Sequences with contexts that are alike to a hundredth.
    #[test]
    fn what_nearly_always_comes_together_is_still_told_apart() {
        let costs = [5e-3, 10e-6, 0.05e-6, 20e-6, 1e-9];
        let row = |i: u32| {
            let n = f64::from(i % 17);
            [1.0, n, n * (1000.0 + f64::from(i % 11)), f64::from(i % 7) * 100.0, f64::from(i % 5) * 1e5]
        };
        let (products, sums) = equations(&(0..500).map(row).collect::<Vec<_>>(), |row| dot(row, &costs));
        let found = least_squares(&products, &sums).unwrap();
        for kind in 0..KINDS {
            assert!((found[kind] / costs[kind] - 1.0).abs() < 1e-3, "{found:?}");
        }
    }

    #[test]
    fn what_was_never_there_costs_nothing_and_of_twins_one_does() {
        let (products, sums) = equations(&[[1.0, 2.0, 4.0, 0.0, 0.0], [1.0, 3.0, 6.0, 0.0, 0.0]], |row| 1.0 + row[1]);
        let found = least_squares(&products, &sums).unwrap();
        assert!((dot(&found, &[1.0, 2.0, 4.0, 0.0, 0.0]) - 3.0).abs() < 1e-9, "{found:?}");
        assert!(found[3] == 0.0 && found[4] == 0.0 && (found[1] == 0.0) != (found[2] == 0.0), "{found:?}");
        assert_eq!(least_squares(&[[0.0; KINDS]; KINDS], &[0.0; KINDS]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn no_other_costs_are_better(
            rows in prop::collection::vec(prop::array::uniform5(0.0..10.0f64), 6..20),
            seconds in prop::collection::vec(0.0..10.0f64, 20),
            others in prop::collection::vec(prop::array::uniform5(0.0..3.0f64), 20),
        ) {
            let mut next = seconds.iter().cycle();
            let times: Vec<f64> = rows.iter().map(|_| *next.next().unwrap()).collect();
            let at = |row: &Row| times[rows.iter().position(|other| other == row).unwrap()];
            let (products, sums) = equations(&rows, at);
            let found = least_squares(&products, &sums).unwrap();
            prop_assert!(found.iter().all(|cost| *cost >= 0.0));
            let least = value(&products, &sums, &found);
            for other in &others {
                prop_assert!(least <= value(&products, &sums, other) + 1e-9, "{other:?} is better than {found:?}");
            }
        }
    }
}
